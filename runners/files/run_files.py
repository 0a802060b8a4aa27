"""Defines the names of files that a run writes into its folder, next to its checkpoints and
`final`.
"""

METRICS = "training_log.jsonl"
EVENTS = "events.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESOLVED = "config.resolved.json"
LOCK = ".lock"
BEST = "best"
"""A folder with the weights of the best evaluation; a checkpoint contains one too."""
EVALUATION = "evaluation.json"
"""A file in it with the results of that evaluation."""
OWN_RUNS = "own-runs"
"""A folder in the user's cache: configs that this user has trained with, so their code has run here
and may run again.
"""
