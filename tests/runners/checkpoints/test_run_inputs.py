"""A resumed run compares its columns, rewards' files, base weights, config.json and arithmetic."""

import json
import shutil
from types import SimpleNamespace

import attrs
import mlx.core as mx
import numpy as np
import pytest

from runners.checkpoints.run_inputs import columns_read, run_inputs
from runners.config.loading import Config, load_config
from runners.config.sections import EnvConfig, ModelConfig
from runners.errors import UserError
from runners.machine.arithmetic import arithmetic_facts
from runners.machine.startup import Platform
from runners.rewards.builtin import REWARDS
from runners.rewards.functions import Reward
from runners.training import start
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import Notes, small
from tests.support.tiny_states import same_bits

REWARD = """
def level_reward(completions, level):
    return [float(len(completion[0]["content"]) % 7 * level[0]) for completion in completions]
"""
ROWS = [{"question": f"{n} + 1 =", "answer": str(n + 1), "level": n % 3 + 1, "note": "x"} for n in range(12)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was ended after two of its three steps, adapters over a base."""
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
    """A copy of that folder, which is the current one."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(folder, rows):
    """The run's data set."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(*, resume=False, allow=False):
    """Runs the config of the current folder; the result and the lines that were worth reading."""
    notes = Notes()
    result = run_training(load_config("train.toml"), report=notes, resume=resume, allow_config_change=allow)
    return result, notes.lines


def other_column(folder):
    """A reward reads it; prompts and answers are as they were."""
    write_rows(folder, [{**row, "level": row["level"] + 1} for row in ROWS])


def other_reward(folder):
    """The same name and another function."""
    (folder / "level.py").write_text(REWARD.replace("% 7", "% 5"))


def other_base(folder):
    """One number of its weights."""
    weights = dict(mx.load(str(folder / "base/model.safetensors")))
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = mx.array(weights[name])
    weights[name][3, 4] += 0.5
    mx.eval(weights)
    mx.save_safetensors(str(folder / "base/model.safetensors"), weights, {"format": "mlx"})


def other_end(folder):
    """A token that did not end a completion before."""
    (folder / "base/generation_config.json").write_text('{"eos_token_id": [2, 5]}')


def other_config(folder):
    """Another θ: no shape tells of it."""
    file = folder / "base/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 5e5}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_column, 'the column "level", which a reward reads'),
        (other_reward, "the file of the reward level.py:level_reward"),
        (other_base, "the weights of the base model"),
        (other_config, "the model's config.json"),
        (other_end, "the tokens that end a completion"),
    ],
)
def test_what_the_weights_depend_on_has_to_be_what_it_was(place, change, named):
    """Named and refused, with not a byte changed; --allow-config-change goes on and says so."""
    change(place)
    before = {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train(resume=True)
    want = (
        f"{named}: not what out/small/checkpoint-2 was trained with; --allow-config-change continues anyway"
    )
    assert str(caught.value) == want
    assert {path: path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()} == before
    result, lines = train(resume=True, allow=True)
    assert result.updates == 3
    assert f"{named}: not what out/small/checkpoint-2 was trained with" in lines


def test_what_nothing_depends_on_may_change(place, finished):
    """A column that no reward reads, and the spaces of a config.json."""
    whole, _ = train(resume=place / "out/small/checkpoint-1")
    shutil.rmtree(place / "out/small/checkpoint-3")
    write_rows(place, [{**row, "note": "y", "more": 1} for row in ROWS])
    file = place / "base/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=7, sort_keys=True))
    result, lines = train(resume=True)
    assert same_bits(result.state, whole.state)
    assert not any("not what" in line or "bit for bit" in line for line in lines)


def test_other_held_out_problems_are_reported(place):
    """Exact match before and after is of other problems; the weights do not depend on them."""
    write_rows(place, [*ROWS[:-1], {**ROWS[-1], "answer": "0"}])
    result, lines = train(resume=True)
    assert result.updates == 3
    assert "the held-out problems: not what out/small/checkpoint-2 was trained with" in lines


def test_another_arithmetic_is_told(place, monkeypatch):
    """Other threads of the BLAS give other last bits: the run goes on, and a line has both numbers."""
    here = arithmetic_facts(Platform(backend="cpu", blas="libopenblas.so.0"))
    monkeypatch.setattr(start, "arithmetic_facts", lambda _: {**here, "cores": 64, "more": "x"})
    result, lines = train(resume=True)
    assert result.updates == 3
    (line,) = [line for line in lines if "bit for bit" in line]
    assert "cores (was" in line and "is 64)" in line and 'more (was None, is "x")' in line


def test_which_columns_a_reward_is_given():
    """Those that it names; all with **kwargs, but for the built-in ones, which read the answer alone."""
    names = ["question", "answer", "level"]

    def named(completions, level, question="", answer=""):
        return [0.0]

    def everything(completions, **columns):
        return [0.0]

    assert columns_read([Reward("a", named)], names) == ["question", "level"]
    assert columns_read([Reward("a", everything)], names) == ["question", "level"]
    assert columns_read([Reward("a", everything)], names, with_gold=False) == names
    assert columns_read([Reward(name, function) for name, function in REWARDS.items()], names) == []


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """`run_inputs` of a config with an environment, and of one example whose column `x` has a value."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text("class Shop: ...")
    (tmp_path / "config.json").write_text("{}")
    env = EnvConfig(factory="shop.py:Shop", tools=("shop.py:price", "shop.py"))
    config = attrs.evolve(Config(model=ModelConfig(path="x")), env=env)
    loaded = SimpleNamespace(path=tmp_path, eos_ids=(2,), base_digest="")

    def found(value=0):
        example = SimpleNamespace(columns={"x": value}, tokens=[1], answer="")
        return run_inputs(config, loaded, [example], [], [Reward("r", lambda completions, x: [])])

    return found


def test_the_files_of_environments_are_compared(inputs, tmp_path):
    """A class, a tool, and a file of tools: each decides what a conversation says."""
    found = inputs()
    assert [name for name in found if "file" in name] == [
        *("the file of the tool shop.py:price", "the file of the tool shop.py", "the file of env.factory"),
    ]
    (tmp_path / "shop.py").write_text("class Shop: other = 1")
    assert inputs()["the file of env.factory"] != found["the file of env.factory"]


def test_columns_are_compared_in_full_and_alike_in_every_process(inputs):
    """Long arrays to their last number; without the order of sets and without places in memory."""

    class Thing:
        pass

    def digest(value):
        return inputs(value)['the column "x", which a reward reads']

    many = np.arange(10_000)
    other = many.copy()
    other[5_000] = 0
    assert digest(many) == digest(np.arange(10_000)) != digest(other)
    assert digest(many.astype(object)) != digest(other.astype(object))
    assert digest({"a", "b"}) == digest({"b", "a"}) and digest([Thing()]) == digest([Thing()])
    assert digest({"a": [1, None, 2.5, "é\ud800", b"x", (True,)]}) != digest({"a": [1, None, 2.5, "é", b"x"]})
