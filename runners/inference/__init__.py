"""Generates text with models, also from images, for `grpo generate` and `grpo chat`. This folder
does not depend on training.
"""
