"""Where code runs that a config names (rewards, tools, environments):
in a process beside the run, or here.

Imports config, machine and errors; whatever runs in that process is named by text,
and imported there.
"""
