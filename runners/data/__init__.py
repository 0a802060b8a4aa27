"""From a file, folder or Hub name to the prompts of a run.

It does not depend on rewards or models' weights.
"""
