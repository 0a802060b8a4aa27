"""Training with programs that contain the agent loop: each episode is a process, or a task of a
taskset, that calls the model over HTTP.
"""
