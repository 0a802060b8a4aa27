"""Variants of a model's layers for the policy: the same functions, but faster, differentiable, or
with few bits.

Functions that change layers affect a single module instance. Nothing here depends on caches or
decoding.
"""
