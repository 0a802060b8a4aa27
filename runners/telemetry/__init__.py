"""A run's output: log lines, completions, the display, dashboards, warnings.

It does not change the run.
"""
