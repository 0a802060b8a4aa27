"""Tools and environments that reply to a model's turns, and the tokens of calls and observations.

Imports rewards, data, tokenization and their dependencies; no training.
"""
