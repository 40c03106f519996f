"""Synchronisation of a training step: gradients under DDP, shards of FSDP2, local steps."""
