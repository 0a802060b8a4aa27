"""Names that a config may use in place of files and functions: of models, data and rewards."""

EMBEDDED = "embedded"

EMBEDDED_TOOLS = "embedded-tools"

SHIPPED = (EMBEDDED, EMBEDDED_TOOLS)
"""The names of the shipped models and data, for `model.path` and `data.source`."""

SELF = "self"
"""The name of the student itself, for `teacher.path`."""

TASKS = "reasoning-gym:"

TASK_SCORE = "runners.rewards.task_score:task_score"
"""How `data.source` names a task of reasoning-gym, and the reward that is its own scoring."""

REWARD_NAMES = (
    "correctness_reward_func",
    "int_reward_func",
    "strict_format_reward_func",
    "soft_format_reward_func",
    "xmlcount_reward_func",
)

REWARD_ARGUMENTS = (
    "completions",
    "prompts",
    "completion_ids",
    "trainer_state",
    "thought_tags",
    "log_extra",
    "log_metric",
    "environments",
)
"""The arguments that every reward may take besides the dataset's columns."""
