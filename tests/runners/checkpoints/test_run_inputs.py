"""A resumed run compares columns, reward files, base weights, config.json and arithmetic."""

import json
import shutil
import time

import pytest

from runners.checkpoints.run_inputs import START
from runners.config.loading import load_config
from runners.errors import UserError
from runners.files.tensor_files import load_arrays, save_arrays
from runners.machine.startup import Platform
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import Notes, small

REWARD = """
def level_reward(completions, level):
    return [float(len(completion[0]["content"]) % 7 * level[0]) for completion in completions]
"""
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3 + 1, "note": "x"} for n in range(12)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of adapters that ended after two of its three steps."""
    folder = tmp_path_factory.mktemp("finished")
    make_model_folder(folder / "base")
    write_rows(folder, ROWS)
    (folder / "level.py").write_text(REWARD)
    (folder / "train.toml").write_text(
        small(
            run={"output_dir": "out"},
            model={"path": "base", "tune": "lora", "lora": {"rank": 2}},
            data={"source": "rows.jsonl", "eval_split": "train"},
            reward={"functions": ["level.py:level_reward"]},
            optim={"max_steps": 3},
            checkpoint={"every": 1},
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train()
    shutil.rmtree(folder / "out/small/checkpoint-3")
    return folder


@pytest.fixture
def place(finished, tmp_path, monkeypatch):
    """A copy of that folder, as the current directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(folder, rows):
    """Writes the run's data set."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*, resume=False, allow=False):
    """Runs the config in the current directory; returns the result and the messages."""
    notes = Notes()
    result = run_training(load_config("train.toml"), report=notes, resume=resume, allow_config_change=allow)
    return result, notes.lines


def other_base(folder):
    """Changes one number of the base model's weights."""
    weights, _ = load_arrays(folder / "base/model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] += 0.5
    save_arrays(folder / "base/model.safetensors", weights, {"format": "mlx"})


def other_config(folder):
    """Changes rope_theta, which no shape depends on."""
    file = folder / "base/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 5e5}))


CHANGES = {
    "the data's columns": lambda f: write_rows(f, [{**row, "level": row["level"] + 1} for row in ROWS]),
    "the file of the reward level.py:level_reward": lambda f: (f / "level.py").write_text(
        REWARD.replace("% 7", "% 5")
    ),
    "the weights of the base model": other_base,
    "the model's config.json": other_config,
    "the tokens that end a completion": lambda f: (f / "base/generation_config.json").write_text(
        '{"eos_token_id": [2, 5]}'
    ),
}


@pytest.mark.parametrize("named", CHANGES)
def test_changed_inputs_must_be_allowed(place, named):
    """The error names the input and no file changes; --allow-config-change continues with a message."""
    CHANGES[named](place)
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train(resume=True)
    want = f"{named}: changed since out/small/checkpoint-2 was trained"
    want += "; --allow-config-change continues anyway"
    assert str(caught.value) == want
    assert {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()} == before
    result, lines = train(resume=True, allow=True)
    assert result.updates == 3
    assert f"{named}: changed since out/small/checkpoint-2 was trained" in lines


def test_a_different_arithmetic_is_reported(place, monkeypatch):
    """A different number of BLAS threads changes the last bits; the run continues with a message."""
    here = Platform(backend="cpu", blas="libopenblas.so.0").arithmetic()
    monkeypatch.setattr(Platform, "arithmetic", lambda _: {**here, "cores": 64, "more": "x"})
    result, lines = train(resume=True)
    assert result.updates == 3
    (line,) = [line for line in lines if "last bits" in line]
    assert "cores (was" in line and "is 64)" in line and 'more (was None, is "x")' in line


def test_a_resumed_run_keeps_the_date_of_its_first_start(place):
    """The template writes the time in seconds, and the prompts stay the same."""
    (place / "dated.jinja").write_text(
        "{{ strftime_now('%H:%M:%S ') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    text = (place / "train.toml").read_text()
    (place / "train.toml").write_text(text.replace("[data]", '[data]\nchat_template = "dated.jinja"', 1))
    run_training(load_config("train.toml", ["optim.max_steps=1"]), overwrite=True)
    first = json.loads((place / "out/small/checkpoint-1/trainer_state.json").read_text())
    time.sleep(1.1)
    run_training(load_config("train.toml", ["optim.max_steps=2"]), resume=True, allow_config_change=True)
    state = json.loads((place / "out/small/checkpoint-2/trainer_state.json").read_text())
    assert state["data"] == first["data"] and state["inputs"] == first["inputs"]
    assert START in state["inputs"]
