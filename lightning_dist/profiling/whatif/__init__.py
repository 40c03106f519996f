"""Predictions: step time with another codec, form, link or number of nodes."""
