"""Defines names for models, data and rewards that a config can use instead of files and
functions.
"""

import re

EMBEDDED = "embedded"

SHIPPED_PRESETS = {EMBEDDED: "quickstart", "embedded-tools": "quickstart_tools"}
"""The preset that trains each shipped model."""

SHIPPED = tuple(SHIPPED_PRESETS)
"""The names of the shipped models and data, for `model.path` and `data.source`."""

SELF = "self"
"""The name of the student itself, for `teacher.path`."""

TASKS = "reasoning-gym:"
"""The prefix of reasoning-gym's tasks in `data.source`."""

TASK_SCORE = "runners.rewards.task_score:task_score"
"""The reward that calls the scoring function of a reasoning-gym task."""

TASKSETS = "verifiers:"
"""The prefix of the verifiers library's tasksets in `env.taskset` and `data.source`."""

REWARD_NAMES = (
    "correctness_reward_func",
    "int_reward_func",
    "strict_format_reward_func",
    "soft_format_reward_func",
    "xmlcount_reward_func",
)

EXAMPLE_REWARD = '''\
def reward(completions, **columns):
    """1.0 for at most 120 words that end as a sentence does, else 0.0; `columns` has the data's columns."""
    texts = [completion[-1]["content"].rstrip() for completion in completions]
    return [float(len(text.split()) <= 120 and text.endswith((".", "!", "?"))) for text in texts]
'''
"""The reward that `grpo init` writes for data without answers.

If it is unchanged, `data.answer` replaces it.
"""

REWARD_ARGUMENTS = (
    "completions",
    "prompts",
    "completion_ids",
    "trainer_state",
    "thought_tags",
    "log_extra",
    "log_metric",
    "environments",
    "printed",
)
"""The arguments that every reward may accept in addition to the data's columns."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_HUB = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://"
_OTHER_NAMES = {
    r"[a-z]:[\\/].*|.*\\.*": (
        "a Windows path; expected a macOS or Linux path, such as /mnt/c/models/qwen in WSL"
    ),
    rf"(?:{_HUB})(?:datasets/)?([\w.-]+/[\w.-]+)(?:[/?#].*)?": (
        'a Hub address; expected the name, "{0}"'
    ),
    r"[a-z0-9+.-]+://.*": "an address; expected a folder, or a name on the Hub",
    r"([\w.-]+(?:/[\w.-]+)?)[@:]([\w./-]+)": (
        "a name with a revision; expected only {0}, or a folder to which `hf download` has saved "
        "{1}"
    ),
}


def other_name(text: str) -> str:
    """Returns an explanation for a text that is neither a folder nor a Hub name, or "" if there is
    none.
    """
    for pattern, meaning in _OTHER_NAMES.items():
        match = re.fullmatch(pattern, text, re.IGNORECASE)
        if match:
            return meaning.format(*match.groups())
    return ""
