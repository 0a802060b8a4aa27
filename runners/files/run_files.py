"""The names of the files that a run writes into its folder, next to its checkpoints and `final`."""

METRICS = "training_log.jsonl"
EVENTS = "events.jsonl"
COMPLETIONS = "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESOLVED = "config.resolved.json"
LOCK = ".lock"
BEST = "best"
"""A folder with the weights of the best evaluation; a checkpoint has one, too."""
EVALUATION = "evaluation.json"
"""In it: what that evaluation measured."""
OWN_RUNS = "own-runs"
"""In the user's cache: configs that this user has trained with, whose code has run here and may run
again.
"""
