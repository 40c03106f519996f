"""CommProfiler."""
