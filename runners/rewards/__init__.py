"""Finds rewards by name, calls them safely, and combines their results into the learner's
experience.
"""
