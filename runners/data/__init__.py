"""Reads the prompts of a run from a file, a folder or the Hub; uses neither rewards nor model
weights.
"""
