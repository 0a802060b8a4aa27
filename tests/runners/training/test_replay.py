"""A run follows its config: it is replayed in NumPy float64 from the keys and the completions."""

import copy
import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from grpo_fn.algorithm.presets import PRESETS
from runners.config.loading import load_config
from runners.files.toml_files import toml_text
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.runners.training.replay import RECORDING, Replay, read_calls
from tests.support.closeness import assert_same_figures, assert_same_weights
from tests.support.replay_cases import CASES, OF_SPEED, OF_THE_CALLS, SECTIONS
from tests.support.resuming import lines_of
from tests.support.tiny_models import make_model_folder

ROWS = 5
SET = [
    (name, section, key)
    for name, case in CASES.items()
    for section in SECTIONS
    for key in case[section]
    if key not in OF_THE_CALLS | OF_SPEED
]


@functools.cache
def scratch():
    """A temporary folder with the model and the data."""
    made = tempfile.TemporaryDirectory(prefix="replay-")
    folder = Path(made.name)
    model = make_model_folder(folder / "model", "llama", layers=1)
    weights: Any = mx.load(str(model / "model.safetensors"))
    weights["model.embed_tokens.weight"][2] *= 6  # so that some completions end
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    rows = [json.dumps({"question": f"{n}+{n}?" + "!" * n, "answer": "1"}) + "\n" for n in range(ROWS)]
    (folder / "rows").mkdir()
    for split in ("train", "valid"):
        (folder / "rows" / f"{split}.jsonl").write_text("".join(rows))
    (folder / "recording.py").write_text(RECORDING)
    return made, folder


@functools.cache
def trained(name):
    """The folder of a case's run, and the calls of its rewards, except for the final evaluation's."""
    _, folder = scratch()
    (folder / "calls.jsonl").unlink(missing_ok=True)
    case = copy.deepcopy(CASES[name])
    case["reward"]["functions"] = ["recording.py:odd", "recording.py:last"]
    config = folder / f"{name}.toml"
    tables = {
        "run": {"name": name.replace(",", ""), "output_dir": str(folder)},
        "model": {"path": str(folder / "model")},
        "data": {
            "source": str(folder / "rows"), "eval_split": "valid", "system_prompt": "", "nudge": "",
        },
        "eval": {"samples": 1, "at_start": False},
        "log": {"report": False},
        **case,
    }  # fmt: skip
    config.write_text(toml_text(tables))
    done = run_training(load_config(str(config)), report=Quiet()).folder
    return done, read_calls(folder / "calls.jsonl")[:-1]


def defaults(section, case):
    """The keys of a section that a case does not set."""
    keys = attrs.asdict(SECTIONS[section]())
    if section == "loss":
        recipe = PRESETS[case["loss"].get("preset", "grpo")]
        keys |= attrs.asdict(recipe.spec) | {"overlong": {"buffer": 0, "penalty": 1.0}}
        keys |= {key: getattr(recipe, key) for key in ("baseline", "scale", "dynamic_sampling")}
    return keys


def replayed(name, changes=()):
    """The figures and weights of a case with changed keys, and its initial weights."""
    _, folder = scratch()
    case = copy.deepcopy(CASES[name])
    for section, key, value in changes:
        case[section][key] = value
    tokenizer = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    start: Any = mx.load(str(folder / "model/model.safetensors"))
    weights = {name: np.array(leaf, np.float64) for name, leaf in start.items()}
    replay = Replay(
        [SimpleNamespace(**defaults(section, case) | case[section]) for section in SECTIONS],
        copy.deepcopy(trained(name)[1]),
        weights,
        json.loads((folder / "model/config.json").read_text()),
        lambda text: (
            tokenizer.encode(
                f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
            ).ids
        ),
    )
    theta = replay.run(ROWS)
    return replay.lines, {name: mx.array(leaf.astype(np.float32)) for name, leaf in theta.items()}, start


def differences(found, wanted):
    """A text with the differences between a run or a replay and a replay; empty if there are none."""
    lines, weights, start = wanted
    try:
        for one, other in zip(found[0], lines, strict=True):
            assert_same_figures(one, other)
        assert_same_weights(found[1], weights, start)
    except (AssertionError, ValueError) as error:
        return str(error) or "the weights"
    return ""


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_its_replay(name):
    """Figures of every update, and the weights at the end."""
    folder, _ = trained(name)
    log = [line for line in lines_of(folder / "training_log.jsonl") if "loss" in line]
    assert differences((log, folder / "final"), replayed(name)) == ""


@pytest.mark.parametrize(("name", "section", "key"), SET)
def test_each_key_of_a_replay_matters(name, section, key):
    """With the key's default the replay differs, so a run that ignored the key would be detected."""
    default = defaults(section, CASES[name])[key]
    try:
        other = replayed(name, [(section, key, default)])
    except (AssertionError, StopIteration, TypeError):
        return  # it cannot even have drawn these completions, or makes no sense without another key
    assert differences(other, replayed(name)) != ""


def test_batch_steps_of_one_update_have_different_random_keys():
    """The same prompt, sampled twice before an update, has different completions."""
    trained("clip, two passes")
    more = ["run.name=keys", "data.max_samples=1", "optim.batch_size=1", "optim.minibatches=1"]
    config = load_config(str(scratch()[1] / "clip, two passes.toml"), [*more, "optim.max_steps=2"])
    lines = lines_of(run_training(config, report=Quiet()).folder / "completions.jsonl")
    first, second = ([x["completion"] for x in lines if x["batch_step"] == step] for step in (1, 2))
    assert {line["update"] for line in lines} == {1} and first != second
