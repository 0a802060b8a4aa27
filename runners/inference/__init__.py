"""Generates text with models, for `grpo generate` and `grpo chat`, also from images. Nothing here
depends on training.
"""
