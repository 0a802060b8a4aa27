"""A run's reports: log lines, completions, the display, dashboards, warnings.

It changes nothing in the run.
"""
