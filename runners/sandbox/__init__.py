"""Runs programs that a model wrote, isolated from the rest of the machine."""
