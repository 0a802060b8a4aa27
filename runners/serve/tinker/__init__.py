"""Tinker's training wire: adapters over one base model, trained and sampled by requests."""
