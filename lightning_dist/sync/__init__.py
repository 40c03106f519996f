"""What a training step sends: gradients under DDP, shards of FSDP2, what local steps changed."""
