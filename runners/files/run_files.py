"""The names of the files that a run writes into its folder, beside its checkpoints and `final`."""

METRICS, EVENTS, COMPLETIONS = "training_log.jsonl", "events.jsonl", "completions.jsonl"
EVALUATIONS = "evaluations.jsonl"
RESOLVED, LOCK = "config.resolved.json", ".lock"
OWN_RUNS = "own-runs"
"""In the user's cache: configs that this user has trained with, whose code has run here and may run again."""
