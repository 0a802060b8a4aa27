"""Variants of a model's layers that compute the same functions, but are faster or differentiable,
or have few-bit weights.

Functions that change layers affect a single module instance. Nothing here depends on caches or
decoding.
"""
