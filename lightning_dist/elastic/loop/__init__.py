"""Elastic restart for a loop of the user's own: `lightning_dist.ElasticLoop`."""
