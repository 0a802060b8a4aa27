"""Finds, checks, reads, adapts and writes model folders and modules.

No data, no rewards, no loop.
"""
