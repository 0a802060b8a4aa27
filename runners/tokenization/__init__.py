"""Tokenizers and chat formats: checked before their first use, text to tokens and back. No weights."""
