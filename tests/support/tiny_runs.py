"""Complete runs of a few updates: their config, a reward, their messages, and random models."""

import json
from pathlib import Path
from typing import Any

import attrs

from runners.config.loading import load_config
from runners.files.toml_files import toml_text
from runners.telemetry.events import Note
from runners.telemetry.report import Quiet
from runners.training.train import RunResult, run_training
from tests.support.tiny_models import make_model_folder

# The first of the embedded problems. All 4,400 take a run longer to prepare than its steps.
PROBLEMS = Path(__file__).with_name("problems")
SMALL = {
    "run": {"name": "small"},
    "model": {"path": "embedded"},
    "data": {"source": str(PROBLEMS), "eval_split": "valid", "system_prompt": ""},
    "answer": {"form": "xml"},
    "rollout": {"num_generations": 4, "max_new_tokens": 8},
    "optim": {"learning_rate": 1e-3, "batch_size": 2, "max_steps": 2},
    "eval": {"samples": 2, "at_start": False},
    "checkpoint": {"every": 0},
}
BY_LETTERS = {"functions": ["letters.py:letters"]}  # [reward], with LETTERS in the config's folder
LETTERS = '''"""A reward that random text earns more or less of: how many different characters it has."""


def letters(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]
'''


class Notes(Quiet):
    """Keeps the messages worth reading."""

    def __init__(self):
        """None yet."""
        self.lines = []

    def handle(self, event):
        """Keeps what it is for."""
        if isinstance(event, Note):
            self.lines.append(event.text)


def small(**tables: dict) -> str:
    """The text of a small run's config, with these keys of its tables in place of SMALL's or beside them."""
    return toml_text({name: SMALL.get(name, {}) | tables.get(name, {}) for name in {**SMALL, **tables}})


@attrs.frozen
class Ran:
    """A finished run: its result, the records of its log, and its lines worth reading."""

    result: RunResult
    log: list[dict]
    notes: list[str]

    @property
    def updates(self) -> list[dict]:
        """The log's records of updates, without those of evaluations."""
        return [record for record in self.log if "loss" in record]


def ran(folder: Path, *overrides: str, text: str | None = None, **how: Any) -> Ran:
    """A run of the config `text` (None: `small`) in this folder, with LETTERS beside it."""
    (folder / "letters.py").write_text(LETTERS)
    path, notes = folder / "train.toml", Notes()
    path.write_text(text or small(), encoding="utf-8")
    usual = [f"run.output_dir={folder / 'out'}", "run.overwrite=true"]
    result = run_training(load_config(str(path), [*usual, *overrides]), report=notes, **how)
    log = (result.folder / "training_log.jsonl").read_text(encoding="utf-8").splitlines()
    return Ran(result, list(map(json.loads, log)), notes.lines)


def updates_of(run: Path) -> list[dict]:
    """The log lines of the updates in a run's folder."""
    lines = map(json.loads, (run / "training_log.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def train(folder: Path, name: str, tune: str, *, base: Path | None = None, **model) -> Path:
    """The folder of a finished run of four updates, with a checkpoint every two; its base is beside it.

    Args:
        folder: gets `outputs/NAME`, `base-NAME`, a config and a reward.
        tune: "full", "lora" or "dora".
        base: a model's folder in place of a new one.
        model: what `make_model_folder` takes.
    """
    base = base or make_model_folder(folder / f"base-{name}", **model)
    (folder / "letters.py").write_text(LETTERS)
    config = folder / f"{name}.toml"
    config.write_text(
        small(
            run={"name": name, "output_dir": str(folder / "outputs")},
            model={"path": str(base), "tune": tune, "lora": {"rank": 4, "scale": 8.0}},
            data={"system_prompt": "Think first.", "nudge": "<reasoning>"},
            rollout={"launch": "eval"},
            reward=BY_LETTERS,
            optim={"learning_rate": 5e-3, "max_steps": 4},
            eval={"at_start": True},
            checkpoint={"every": 2},
        )
    )
    return run_training(load_config(str(config)), report=Quiet()).folder
