"""Benchmarks of lightning_dist, and the test-bed (several hosts on one machine) they run on."""
