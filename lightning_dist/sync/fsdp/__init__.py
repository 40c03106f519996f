"""FSDP2: models that ``fully_shard`` has sharded."""
