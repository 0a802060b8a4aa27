"""Tinker's training API: clients train adapters on one base model and sample from them."""
