"""Handles tokenizers and prompt settings: checks a tokenizer before its first use, and converts
between text and tokens.

Nothing here loads weights.
"""
