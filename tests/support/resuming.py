"""Runs that are interrupted and resumed, and what must be equal afterwards."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, cast

from runners.config.loading import load_config
from runners.files.tensor_files import load_arrays
from runners.telemetry.events import Evaluated, Status, Updated
from runners.telemetry.report import Quiet
from runners.training.train import RunResult, run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import PROBLEMS

TINY = """
[run]
name = "tiny"
[model]
path = "{model}"
[data]
source = "{problems}"
eval_split = "valid"
system_prompt = ""
max_samples = 18
[rollout]
num_generations = 4
max_new_tokens = 4
temperature = 1.5
launch = "eval"
[reward]
functions = ["{folder}/letters.py:letters"]
[optim]
learning_rate = 1e-3
batch_size = 4
max_steps = 6
[eval]
every = 2
samples = 2
[checkpoint]
every = 1
keep_last = 0
"""
# Completions that differ earn differently: every batch step has a gradient.
LETTERS = """
import zlib

def letters(completions, **_):
    return [zlib.crc32(completion[0]["content"].encode()) % 97 / 97 for completion in completions]
"""
SHIPPED = ["model.path=embedded", "rollout.launch=auto"]  # as a newcomer's run is
SHORT = ["optim.max_steps=3", "eval.every=0", "eval.at_start=false"]
NOISY = ("time/", "memory/", "step_time", "tokens_per_second", "ranks/")


class Killed(BaseException):
    """Nothing handles it, as nothing handles SIGKILL."""


class Killer(Quiet):
    """Ends the run in the midst of what it is doing: at the `count`-th status of a kind, or update."""

    def __init__(self, what, count):
        """`what` is the beginning of a status, or "step" or "eval"."""
        self.what, self.left = what, count

    def _tick(self, what):
        if what.startswith(self.what):
            self.left -= 1
            if self.left == 0:
                raise Killed

    def handle(self, event):
        """Counts what is done now; updates and evaluations come after their log lines."""
        match event:
            case Status(text):
                self._tick(text)
            case Updated():
                self._tick("step")
            case Evaluated():
                self._tick("eval")


def embedded_config(folder: Path) -> str:
    """TINY on the model in the package and its problems, for processes; `folder` has letters.py."""
    return TINY.format(folder=folder, model="embedded", problems="embedded")


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    """A folder of this process, with what its tests share."""
    return tempfile.TemporaryDirectory(prefix="resuming-")


@functools.cache
def _model(arch: str = "qwen2") -> Path:
    """A random model of two blocks: what a run does around its steps is the same for all."""
    return make_model_folder(Path(_scratch().name) / arch, arch)


@functools.cache
def straight_run(*settings: str) -> RunResult:
    """An undisturbed run with these settings, made once per process; read its folder only."""
    folder = Path(_scratch().name) / str(straight_run.cache_info().misses)
    return run_training(config_in(folder / "a", *settings), report=Quiet())


def config_in(folder, *overrides, text=TINY):
    """The config of a tiny run in a folder; {mixtral} in an override is a model with experts."""
    folder.mkdir(parents=True, exist_ok=True)
    # One file for all runs of a test: its path is a part of the config.
    shared = folder.parent
    (shared / "letters.py").write_text(LETTERS)
    text = text.replace("{folder}", str(shared)).replace("{model}", str(_model()))
    text = text.replace("{problems}", str(PROBLEMS))
    (shared / "train.toml").write_text(text)
    overrides = [each.replace("{mixtral}", str(_model("mixtral"))) for each in overrides]
    return load_config(str(shared / "train.toml"), [f"run.output_dir={folder}", *overrides])


def lines_of(file: Path):
    """The records of a file of JSON lines, each of which has to be whole."""
    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.splitlines()]


def without_noise(records):
    """Log records but for times and memory."""
    return [{key: value for key, value in record.items() if not key.startswith(NOISY)} for record in records]


def outcome(folder):
    """What a run's folder must contain, however often the run was interrupted, without faults."""
    models = {
        name: {file.name: file.read_bytes() for file in (folder / name).glob("*") if file.is_file()}
        for name in ("final", "best")
    }
    lines = lines_of(folder / "training_log.jsonl")
    log = without_noise([line for line in lines if "fault" not in line])
    return {"log": log, "completions": (folder / "completions.jsonl").read_bytes(), **models}


def saved(folder):
    """All that a checkpoint holds, but for the times in it: arrays by their bits, structure and numbers."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays, metadata = load_arrays(file)
        structure = json.loads(metadata.get("structure", "{}"))
        _forget(structure, "seconds")
        found[file.name] = (
            {name: bytes(memoryview(cast(Any, array))) for name, array in arrays.items()},
            structure,
        )
    state = json.loads((folder / "trainer_state.json").read_text())
    _forget(state, "elapsed")
    state["config"]["run"].pop("output_dir")
    return {**found, "trainer_state": {**state, "logs": None}}


def _forget(tree, name):
    """Removes a key wherever it stands."""
    if isinstance(tree, dict):
        tree.pop(name, None)
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        _forget(part, name)


def killed(config, what, count, **more):
    """Runs until the killer strikes."""
    try:
        run_training(config, report=Killer(what, count), **more)
    except Killed:
        return
    raise AssertionError(f"the run ended before the {count}th {what}")
