"""Manages a run's folder on disk: locks it, saves and prunes checkpoints, and reads them back.

This folder does not depend on the training loop.
"""
