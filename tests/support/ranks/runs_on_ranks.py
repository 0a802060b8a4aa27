"""Configs and records of runs on several ranks."""

from collections.abc import Callable
from pathlib import Path

from tests.support.tiny_runs import small

LETTERS = '''"""How many different characters a completion has; a group may be alike, and is drawn again."""

import zlib


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) // 2 for completion in completions]


def sums(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
'''


def config_writer(folder: Path) -> Callable[..., Path]:
    """Writes configs in the folder, of small runs rewarded by `LETTERS`; each gives its path."""
    (folder / "letters.py").write_text(LETTERS)

    def make(name: str, **tables) -> Path:
        path = folder / f"{name}.toml"
        settings = {
            "rollout": {"max_new_tokens": 8, "launch": "eval", "check_every": 8, "max_batch": 64},
            "reward": {"functions": ["letters.py:letters"]},
            "optim": {"batch_size": 3, "max_steps": 4, "learning_rate": 1e-3},
            "eval": {"samples": 3, "at_start": False},
            "checkpoint": {"every": 1, "keep_last": 0},
            "log": {"report": False},
            "system": {"compile": False},
        }
        merged = {key: settings.get(key, {}) | tables.get(key, {}) for key in {**settings, **tables}}
        run = {"name": name, "output_dir": str(folder / "outputs"), **merged.pop("run", {})}
        path.write_text(small(run=run, **merged))
        return path

    return make


def digests_of(folder: Path, number: int) -> list[list[str]]:
    """Of each of so many ranks a line for the weights after each update."""
    return [(folder / f"{rank}.digests").read_text().splitlines() for rank in range(number)]
