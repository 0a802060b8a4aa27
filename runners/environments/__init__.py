"""What answers a model's turns: tools, environments, and how calls and observations are written as tokens.

Imports rewards, data, tokenization and what these may import; no training.
"""
