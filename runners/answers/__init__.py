"""Extracts answers from completions, and compares them with reference answers."""
