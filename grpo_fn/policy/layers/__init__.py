"""Layers of a model as the policy calls them: the same functions, faster, with a gradient, or in
few bits.

Functions that change layers change only those of one module instance. Nothing here depends on
caches or decoding.
"""
