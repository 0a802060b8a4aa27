"""Predicts the memory of a run phase by phase."""
