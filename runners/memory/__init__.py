"""Predicts a run's memory for each phase."""
