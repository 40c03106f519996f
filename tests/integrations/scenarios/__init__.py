"""Training runs for `run_scenarios.py`: what happened on each rank, judged by the tests."""
