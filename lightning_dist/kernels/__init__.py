"""Passes of codecs over tiles of a gradient: eager, compiled, and Triton kernels."""
