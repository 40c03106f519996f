"""What all rooms use: names of torch, features, devices, log, console, versions."""
