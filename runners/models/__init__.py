"""Finds, checks, reads, adapts and writes model folders and modules.

Nothing here uses data, rewards or the training loop.
"""
