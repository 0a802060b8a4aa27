"""Layers of a model as the policy calls them: the same functions, faster, with a gradient, or in few bits.

What changes layers changes those of one module instance. Nothing here knows of caches or of decoding.
"""
