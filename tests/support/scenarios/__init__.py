"""Trainings of the tests, and scripts that launchers start."""
