"""Tools and environments that reply to a model's turns, and the tokenization of their replies.

Imports rewards, data, tokenization and their dependencies, but not training.
"""
