"""Caches for keys and values: shared prompts, the rows' own tokens, and tokens that are added
later.
"""
