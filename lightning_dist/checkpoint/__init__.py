"""Asynchronous, crash-safe checkpoints; knows neither Lightning nor Accelerate.

A save is: pickle what surrounds the tensors, copy the tensors into memory shared with the writer
(:mod:`.snapshot`), hand it over (:mod:`.writer_queue`), write, publish, remove what it replaces
(:mod:`.disk`).
"""
