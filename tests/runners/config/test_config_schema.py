"""The config's keys: their types, ranges and meanings, and their agreement with the core."""

from typing import get_args, get_origin

import pytest
from click.testing import CliRunner

from runners.cli import run_command
from runners.config import names
from runners.config.loading import KEYS, ConfigError
from runners.config.rules import choices_of, is_text, is_within
from tests.support.processes.new_process import in_new_process


def test_the_choices_are_those_of_the_core():
    """The config repeats the names in grpo_fn, so that loading a config does not import MLX."""
    from grpo_fn.algorithm import AGGREGATES, BASELINES, SCALES
    from grpo_fn.learner import SCHEDULES
    from grpo_fn.policy import MODES, STORAGES
    from runners.rewards import builtin as rewards

    assert set(names.REWARD_NAMES) == set(rewards.REWARDS)
    for section, name, choices in (
        ("reward", "aggregate", AGGREGATES),
        ("loss", "baseline", tuple(BASELINES)),
        ("loss", "scale", tuple(SCALES)),
        ("optim", "schedule", SCHEDULES),
        ("rollout", "quantization", ("none", *MODES)),
        ("loss", "ref_storage", STORAGES),
    ):
        assert choices_of(KEYS[section, name]) == choices, name


def test_loading_imports_nothing_heavy():
    """A faulty config is reported before MLX, datasets or transformers are imported."""
    code = (
        "import sys; from runners.config.loading import load_config; load_config('quickstart');"
        "heavy = {'mlx', 'mlx_lm', 'datasets', 'transformers', 'numpy', 'rich', 'grpo_fn'};"
        "loaded = heavy & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    in_new_process(code)


_SAMPLES = {int: "2", float: "2.5", bool: "true", str: '"x"', list: "[true]", dict: "{x = 1}"}


def taken(kind):
    """The TOML types that a key of this type accepts."""
    if type(None) in get_args(kind):
        return taken(get_args(kind)[0])
    if get_origin(kind) is dict:
        return {dict}
    return {int: {int}, float: {int, float}, bool: {bool}}.get(kind, {str} if is_text(kind) else set())


@pytest.mark.parametrize("path", sorted(KEYS, key=".".join), ids=".".join)
def test_no_key_coerces(load, path):
    """Each key refuses every TOML type except its own; a number may also be an integer."""
    for sample in set(_SAMPLES) - taken(KEYS[path].type):
        key = ".".join(path)
        text = f"{key} = {_SAMPLES[sample]}\n"
        with pytest.raises(ConfigError) as caught:
            load(text if path == ("model", "path") else f'model.path = "embedded"\n{text}')
        (line,) = caught.value.problems
        assert line.startswith(f"train.toml: {key}: expected ") and f", found {_SAMPLES[sample]}" in line


RANGES = {
    ">= 1": ((1, 7), (0, -1)),
    "> 0": ((0.5,), (0, -1)),
    "0 <= x < 1": ((0, 0.5), (1, -0.1)),
    "0 < x <= 1": ((0.5, 1), (0, 1.1)),
    "-1 or >= 1": ((-1, 1), (0, -2)),
    "0 or 32 or 64 or 128": ((0, 128), (16,)),
    "each: 0 <= x < 1": (((0, 0.5),), ((0.5, 1),)),
    "0 <= low < high": (((0, 1),), ((1, 1), (-1, 2))),
    "0 <= x <= 9223372036854775807": ((0, 2**63 - 1), (2**63, -1)),
}


def test_ranges_include_and_exclude_values():
    """Each form of a range accepts the values inside it and refuses the values outside."""
    for within, (inside, outside) in RANGES.items():
        assert all(is_within(value, within) for value in inside), within
        assert not any(is_within(value, within) for value in outside), within


def test_a_key_has_a_meaning():
    """Every field was created by `key` with a meaning."""
    for path, field in KEYS.items():
        assert len(field.metadata["meaning"]) > 5, path


def test_explain_shows_a_key_a_section_and_the_nearest_spelling():
    """`grpo-run --explain` prints the descriptions of docs/config.md."""
    eps, loss, unknown = (
        CliRunner().invoke(run_command, ["--explain", key]) for key in ("optim.eps", "loss", "optim.epss")
    )
    assert "optim.eps: number, default 1e-08; > 0\n  AdamW's" in eps.output
    assert "loss.overlong.buffer: integer" in loss.output
    assert unknown.exit_code == 2 and "did you mean optim.eps?" in unknown.stderr
