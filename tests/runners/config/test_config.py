"""Loading a config: defaults, precedence, overrides, paths, the shipped presets, and the way back to TOML."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config import sections
from runners.config.loading import load_config, write_resolved
from runners.config.reading import PRESET_FOLDER
from runners.errors import ConfigError

MINIMAL = '[model]\npath = "embedded"\n'


def test_later_values_win(load):
    """The order is defaults, loss preset, file, --set; the last of several --set takes precedence."""
    text = MINIMAL + '[loss]\npreset = "dapo"\nepsilon_low = 0.1\nmax_resample = 5\n'
    loss = load(text, "loss.max_resample=6", "loss.max_resample=7").check().loss
    assert (loss.epsilon_high, loss.dynamic_sampling) == (0.28, True)  # the preset's
    assert loss.epsilon_low == 0.1  # the file's, over the preset's 0.2
    assert loss.max_resample == 7  # the command line's, over the file's
    assert loss.kl == "k3"  # LossSpec's default


@pytest.mark.parametrize(
    ("key", "found", "gold"),
    [("ignore_case", "New York", "new york"), ("ignore_spaces", "New York", "NewYork")],
)
def test_answers_are_compared_as_the_config_says(load, key, found, gold):
    """The two answers agree only with answer.ignore_case or answer.ignore_spaces."""
    for value in (True, False):
        config = load(f"{MINIMAL}[answer]\nform = 'exact'\n{key} = {str(value).lower()}\n").check()
        assert config.answer_form and config.answer_form.agree(found, gold) == value


def test_check_fills_in_the_presets_values(load):
    """No value is None afterwards; DAPO's overlong buffer is a share of the length limit, in tokens."""
    config = load(MINIMAL + '[loss]\npreset = "dapo"\n', "rollout.max_new_tokens=100").check()
    assert config.loss.overlong == sections.OverlongConfig(buffer=20, penalty=1.0)
    assert (config.loss.baseline, config.loss.scale) == ("group_mean", "group")
    assert config.check() == config
    assert config.loss_spec() == load_config("train.toml").loss_spec()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[loss]\npreset = "dapo"\ndynamic_sampling = false\n', {"dynamic_sampling": False}),
        ('[loss]\npreset = "dapo"\noverlong = {buffer = 0}\n', {"overlong": sections.OverlongConfig()}),
        ('[loss]\npreset = "dapo"\nscale = "none"\n', {"scale": "none"}),
        # GDPO normalises each reward first, and a group without variance has a deviation of 0.
        ('reward.aggregate = "normalize_then_sum"', {"baseline": "batch_mean", "scale": "batch"}),
        ('reward.aggregate = "normalize_then_sum"\nloss.scale = "none"', {"scale": "none"}),
        ('loss.baseline = "batch_mean"', {"baseline": "batch_mean", "scale": "batch"}),
        ('[loss]\npreset = "dr_grpo"\nbaseline = "batch_mean"', {"scale": "none"}),
    ],
)
def test_the_file_overrides_the_preset(load, text, found):
    """An explicit false or zero is a value; baseline and scale match unless [loss] sets both."""
    loss = load('model.path = "embedded"\n' + text).check().loss
    assert {name: getattr(loss, name) for name in found} == found


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.learning_rate=2", "optim", "learning_rate", 2.0),
        (" optim.learning_rate = 2e-5 ", "optim", "learning_rate", 2e-5),
        ("run.name=hotter", "run", "name", "hotter"),
        ("run.name='quoted name'", "run", "name", "quoted name"),
        ("run.name=2024", "run", "name", "2024"),
        ("data.system_prompt=", "data", "system_prompt", ""),
        ("data.nudge=a=b", "data", "nudge", "a=b"),
        ("loss.kl=k1", "loss", "kl", "k1"),
        ('rollout.stop=["</answer>", "\\n\\n"]', "rollout", "stop", ("</answer>", "\n\n")),
        ("model.lora.rank=4", "model", "lora", sections.LoraConfig(rank=4, scale=3.0)),
        ("model.lora={rank=4}", "model", "lora", sections.LoraConfig(rank=4, scale=3.0)),
        ("system.compile=false", "system", "compile", False),
    ],
)
def test_an_override_sets_one_value(load, override, section, key, value):
    """--set accepts TOML, and strings without quotes if the key is a string; nothing else changes."""
    text = '[model]\npath = "embedded"\nlora.scale = 3\n'
    after = load(text, override)
    assert getattr(getattr(after, section), key) == value
    assert load(text).having(section, **{key: value}) == after


def test_relative_paths_are_found_here_or_beside_the_file(tmp_path, monkeypatch):
    """The current folder takes precedence over the config's folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "cfg/model", "cfg/here"):
        Path(folder).mkdir(parents=True)
    text = '[model]\npath = "model"\n[data]\nsource = "rows.jsonl"\n[reward]\nfunctions = ["score.py:f"]\n'
    for name, content in (("score.py", ""), ("rows.jsonl", "{}"), ("train.toml", text)):
        Path("cfg", name).write_text(content)
    config = load_config("cfg/train.toml")
    assert config.model.path == str(Path("cfg/model"))
    assert config.data.source == str(Path("cfg/rows.jsonl"))
    assert config.reward.functions == (f"{Path('cfg/score.py')}:f",)
    assert load_config("cfg/train.toml", ["model.path=here"]).model.path == "here"


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESET_FOLDER.glob("*.toml")))
def test_every_shipped_config_loads(name, tmp_path, monkeypatch):
    """It loads by name and by path, LossSpec accepts its loss, and its TOML loads to the same config."""
    monkeypatch.chdir(tmp_path)
    config = load_config(name).check()
    assert config == load_config(str(PRESET_FOLDER / f"{name}.toml")).check()
    (tmp_path / "again.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config("again.toml") == config
    assert tomllib.loads(config.to_toml()) == config.to_dict()


@given(
    prompt=st.text(max_size=60),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    rate=st.floats(0, 1),
)
def test_to_toml_loads_to_the_same_config(tmp_path_factory, prompt, stop, rate):
    """Any strings and numbers are preserved."""
    file = tmp_path_factory.mktemp("toml") / "train.toml"
    config = load_config(None, ['model.path="embedded"']).having("data", system_prompt=prompt)
    config = config.having("rollout", stop=tuple(stop)).having("optim", learning_rate=rate)
    file.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert load_config(str(file)) == config


def test_a_resolved_config_can_be_loaded_again(tmp_path, monkeypatch):
    """config.resolved.json loads to the config that wrote it; only a JSON object is accepted."""
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", ["run.name=again", "rollout.stop=['x']"]).check()
    assert load_config(str(write_resolved(config))) == config
    for text, message in (
        ('{"run": ', "x.json: not JSON: Expecting value: line 1 column 9"),
        ("[1]", "x.json: expected a JSON object, found [1]"),
        ("[" * 100_000, "x.json: not JSON: "),
    ):
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load_config("x.json")
        assert caught.value.problems[0].startswith(message)
