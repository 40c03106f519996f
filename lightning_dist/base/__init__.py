"""Private names of torch, features, devices, log, console and versions, for all rooms."""
