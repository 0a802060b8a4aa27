"""Runs the code that a config names (rewards, tools, environments), in a separate process or in
this one.

Imports config, machine and errors; functions for that process are named by text, and imported
there.
"""
