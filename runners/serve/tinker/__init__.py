"""Tinker's training API: adapters on one base model, trained and sampled by requests."""
