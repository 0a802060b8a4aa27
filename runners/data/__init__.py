"""From a file, folder or Hub name to the prompts of a run.

Rewards and models' weights are not known here.
"""
