"""Tokenizers and chat formats: checks before their first use, text to tokens and back. No weights."""
