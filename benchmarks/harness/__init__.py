"""Shared parts of the measurements: clocks, models and their work, records, tables, charts. Nothing
is measured here.
"""
