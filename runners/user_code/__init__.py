"""Runs the code that a config names (rewards, tools, environments), in a separate process or in
this one.

Imports config, machine and errors. Functions that run in the separate process are passed by name
and imported there.
"""
