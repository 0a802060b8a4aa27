"""Tokenizers and prompt settings: checks before the first use, text to tokens and back.

No weights.
"""
