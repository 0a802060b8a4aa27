"""Writes a run's output: log lines, completions, the display, dashboards, warnings.

Nothing here changes the run.
"""
