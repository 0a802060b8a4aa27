"""Predicts the memory of a run phase by phase, and watches it while the run goes on."""
