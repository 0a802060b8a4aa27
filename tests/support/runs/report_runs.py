"""Folders as a run leaves them, for tests of the report: small, large, hostile, broken."""

import json
import math
from pathlib import Path

from runners.files.json_files import JsonLines

HOSTILE = (
    "<script>window.ran = true</script>",
    "</script><script>window.ran = true</script><img src=x onerror='window.ran = true'>",
    "\x1b[31mred\x1b[0m \x07 \x00 bell",
    "\u202egnp.exe\u202c \u2066hidden\u2069 مرحبا بالعالم",
    "half a pair: \ud83d, and \udc00 alone",
    "x" * 1_000_000,
    "]]>--><!--{{7*7}}${7*7}`",
    "__proto__ constructor \\ \" ' \u2028 \u2029",
)


def make_run(
    folder: Path,
    *,
    updates: int = 6,
    group: int = 4,
    texts: tuple[str, ...] = ("<reasoning>1+1</reasoning><answer>2</answer>", "no idea"),
    name: str = "",
    nan_at: int | None = None,
    end: str | None = "finished",
    gold: bool = True,
) -> Path:
    """Writes a run's files. `nan_at`: the update whose loss is NaN, and which has no KL. `end`: see Diary.

    `gold`: whether held-out problems have an answer.
    """
    folder.mkdir(parents=True)
    settings = {
        "run": {"name": name or folder.name, "seed": 0},
        "model": {"path": "embedded"},
        "rollout": {"num_generations": group},
        "optim": {"learning_rate": 1e-6},
        "log": {"completions": True},
    }
    (folder / "config.resolved.json").write_text(json.dumps(settings))
    names = ("training_log", "completions", "events", "evaluations")
    files = {name: JsonLines(folder / f"{name}.jsonl") for name in names}
    about = {"model": "embedded (525,184 parameters)", "data": "embedded"}
    start = {"updates": updates, "about": about, "machine": {"backend": "cpu"}, "versions": {"mlx": "0"}}
    files["events"].write({"event": "start", "time": 1_700_000_001.5, "update": 0, "given": [], **start})
    for update in range(updates + 1):
        write_update(files, update, group, texts, nan_at, gold)
    if end:
        files["events"].write({"event": "end", "time": 1_700_000_061.5, "update": updates, "state": end})
    for file in files.values():
        file.close()
    return folder


def write_update(files, update, group=4, texts=("a", "b"), nan_at=None, gold=True):
    """One update's lines; number 0 is only the evaluation, which follows every third update too."""
    if update:
        broken = update == nan_at
        files["training_log"].write(
            {
                "update": update, "batch_step": update, "reward": update / 10, "reward_std": 0.2,
                "rewards/correct/mean": 0.5, "rewards/correct/std": 0.1,
                "rewards/strict_format/mean": 0.4, "rewards/strict_format/std": 0.1,
                "loss": math.nan if broken else 0.01, "grad_norm": math.inf if broken else 0.5,
                "entropy": 0.3, "num_tokens": 100 * update, "step_time": 1.0, "tokens_per_second": 100.0,
                "time/rollout": 0.5, "time/reward": 0.1, "time/checkpoint": 0.0,
                "time/elapsed": float(update),
                "memory/peak_gb": 0.2, "memory/active_gb": 0.1,
                **({"update_skipped": True} if broken else {"kl": 0.02}),
            }
        )  # fmt: skip
        for row in range(2 * group):
            right = row % 2 == 0
            files["completions"].write(
                {
                    "batch_step": update, "update": update,
                    "prompt": f"What is {row // group} + {update}?", "completion": texts[row % len(texts)],
                    "answer": "2", "reward": 1.0 if right else 0.0,
                    "rewards": {"correct": 1.0 if right else 0.0, "strict_format": 0.5 if right else None},
                    "advantage": 1.0 if right else -1.0, "tokens": 5 + row, "finished": row != 1,
                }
            )  # fmt: skip
    if update % 3 == 0:
        reward = {"eval/reward": 0.1 * update, "eval/reward_std": 0.1}
        found = {"em": 0.1 * update, "em_subset": 4} if gold else reward
        files["training_log"].write({"update": update, **found, "time/eval": 0.1})
        for problem in range(4):
            right = problem < update // 3 + 1
            judged = {"answer": "1", "extracted": f"read {right}", "correct": right} if gold else {}
            record = {"update": update, "problem": problem, "prompt": f"problem {problem}"}
            files["evaluations"].write({**record, "completion": f"{right}", **judged, "reward": float(right)})
