"""Layers of a model as the policy uses them: the same functions, but faster, differentiable, or in
few bits.

Functions that change layers affect only one module instance. Nothing here depends on caches or
decoding.
"""
