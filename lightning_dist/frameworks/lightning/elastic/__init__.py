"""ElasticRestart."""
