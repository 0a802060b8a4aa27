"""Predicts a run's memory, phase by phase."""
