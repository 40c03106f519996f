"""What a step would take with another codec, form, link or number of hosts: predictions."""
