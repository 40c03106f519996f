"""Bytes between ranks. Knows process groups and buffers; nothing of DDP or of gradients."""
