"""Trains with programs that contain the agent loop. Each episode is a process, or a task from a
taskset, that calls the model over HTTP.
"""
