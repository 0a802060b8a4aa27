"""`RunState` is saved field by field: each field is restored and checked."""

import itertools
import json
import types
from collections.abc import Mapping
from typing import Any, Union, cast, get_args, get_origin

import attrs
import mlx.core as mx
import numpy as np
import pytest

from runners.checkpoints.checkpoint import load_trees, write_checkpoint
from runners.checkpoints.values import decoded
from runners.config import rules
from runners.errors import RewardError, UserError
from runners.telemetry.report import Quiet
from runners.training.run_state import RunState, restore_state
from runners.training.train import run_training
from tests.support.resuming import config_in, killed
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load, make_state, same_bits


@attrs.frozen(eq=False, kw_only=True)
class More(RunState):
    """A state with two further fields."""

    further: int = rules.key(3, "counted", "0 <= x <= 999")
    noted: tuple[np.ndarray, ...] = ()


DTYPES = itertools.cycle([np.float64, np.float32, np.int32, bool, np.int64, np.uint8])
KINDS = itertools.cycle([mx.float32, mx.int32, mx.bool_, mx.bfloat16, mx.float16, mx.uint32])


def filled(kind: Any, numbers) -> Any:
    """A value of this type in which all parts exist and differ from each other."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return filled(next(one for one in arguments if one is not type(None)), numbers)
    if attrs.has(kind):
        return kind(**filled_fields(kind, numbers))
    if hasattr(kind, "_fields"):
        return kind(*(filled(part, numbers) for part in kind.__annotations__.values()))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {f"a.{next(numbers)}": filled(arguments[1], numbers) for _ in range(2)}
    if origin in (tuple, list, frozenset):
        many = len(arguments) == 1 or arguments[-1] is ...
        return origin(filled(part, numbers) for part in (arguments[:1] * 2 if many else arguments))
    if kind is np.ndarray:
        array = np.array([[next(numbers), 0, 1]]).astype(next(DTYPES))
        return array * np.nan if array.dtype.kind == "f" and next(numbers) % 2 else array
    if kind is Any:  # a tree of arrays
        return {"leaf": filled(mx.array, numbers)}
    if kind is mx.array:
        return mx.array([next(numbers), 0, 1]).astype(next(KINDS))
    return {int: next(numbers), float: next(numbers) / 7, str: f"ö{next(numbers)}", bool: True}[kind]


def filled_fields(kind, numbers):
    """Values for the saved fields of an attrs class."""
    fields = attrs.fields(attrs.resolve_types(kind))
    return {each.name: filled(each.type, numbers) for each in fields if "unsaved" not in each.metadata}


def alike(one: Any, other: Any) -> bool:
    """Equal types, structure, dtypes and bits."""
    if type(one) is not type(other):
        return False
    if attrs.has(type(one)):
        fields = [each.name for each in attrs.fields(type(one)) if "unsaved" not in each.metadata]
        return all(alike(getattr(one, name), getattr(other, name)) for name in fields)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, mx.array | np.ndarray):
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and bytes(memoryview(cast(Any, one))) == bytes(memoryview(other))
    return one == other


@pytest.fixture(scope="module", name="loaded")
def _loaded(tmp_path_factory):
    return load(make_model_folder(tmp_path_factory.mktemp("model") / "llama", "llama"))


@pytest.fixture(scope="module", name="state")
def _state(loaded):
    """A state in which no field, at any depth, has its default."""
    return More(train=make_state(loaded), **filled_fields(More, itertools.count(1)))


def parts_of(state):
    """Its plain values, read from JSON, and its trees, as in a checkpoint's files."""
    plain, trees = state.saved()
    return json.loads(json.dumps(plain)), trees


def test_every_field_is_restored_from_a_checkpoint(state, loaded, tmp_path):
    """Types and bits are equal, also of a subclass's fields and of empty fields."""
    for whole in (state, More(train=state.train)):
        plain, trees = parts_of(whole)
        folder = write_checkpoint(tmp_path, 1, whole.train, loaded, {}, trees)
        train, read = load_trees(folder)
        back = restore_state(plain, read, train, "here", More)
        assert alike(back, whole) and same_bits(back.train, whole.train)
        saved = {each.name for each in attrs.fields(More) if "unsaved" not in each.metadata}
        assert plain.keys() | trees.keys() == saved and not plain.keys() & trees.keys()
    assert {"further", "noted"} <= saved


def test_unsaved_fields_state_the_reason():
    """The metadata of each unsaved field contains a sentence."""
    left = {
        each.name: each.metadata["unsaved"] for each in attrs.fields(RunState) if "unsaved" in each.metadata
    }
    assert left.keys() == {"train", "experiences", "loss_stats"}
    assert all(len(why.split()) > 3 for why in left.values())


NAMES = [each.name for each in attrs.fields(More) if "unsaved" not in each.metadata]


@pytest.mark.parametrize("name", NAMES)
def test_a_field_that_is_missing_or_of_another_type_or_range_is_refused(state, name):
    """The error starts with the place and names the field."""
    plain, trees = parts_of(state)
    rest = {each: value for each, value in {**plain, **trees}.items() if each != name}
    with pytest.raises(UserError, match=f"^here: {name} is missing$"):
        restore_state(rest, {}, state.train, "here", More)
    for wrong in ([[["x"]]], {"x": mx.zeros(3)}, mx.zeros(3), True):
        with pytest.raises(UserError, match=rf"^here: {name}\b.*(: expected .*, found | is missing$)"):
            restore_state({**rest, name: wrong}, {}, state.train, "here", More)
    within = attrs.fields_dict(More)[name].metadata.get("range")
    if within:
        with pytest.raises(UserError, match=f"^here: {name}: expected .*{within}, found -2"):
            restore_state({**rest, name: -2}, {}, state.train, "here", More)


@pytest.mark.parametrize("bits", [{}, {"dtype": "no"}, {"dtype": "O"}, {"shape": [1e400]}, {"shape": [7]}])
def test_an_invalid_array_is_refused(state, bits):
    """The dtype is unknown, the shape does not match the bits, or all is missing."""
    _, trees = parts_of(state)
    spoiled = {**trees["noted"][0], **bits} if bits else bits
    with pytest.raises(UserError, match="noted: expected an array, found"):
        restore_state({**state.saved()[0], **trees, "noted": [spoiled]}, {}, state.train, "here", More)


def test_an_integer_beyond_float64_is_refused():
    """JSON integers have no maximum."""

    @attrs.frozen
    class Measured:
        seconds: float

    assert decoded({"seconds": 3}, Measured, "here").seconds == 3.0
    with pytest.raises(UserError, match="here: seconds: expected a finite number"):
        decoded({"seconds": 10**400}, Measured, "here")


def test_a_resumed_run_keeps_the_count_of_slow_rewards(tmp_path):
    """The third consecutive batch step in which a reward's process ends stops the run."""
    (tmp_path / "ends.py").write_text("import os\n\ndef ends(completions, **_):\n    os._exit(1)\n")
    settings = [f'reward.functions=["{tmp_path}/ends.py:ends", "soft_format_reward_func"]', "eval.every=0"]
    config = config_in(tmp_path / "run", *settings, "eval.at_start=false")
    killed(config, "sampling", 3)
    with pytest.raises(RewardError, match=r'"ends" failed: its process ended; it failed for every'):
        run_training(config, report=Quiet(), resume=True)
    saved = {path.name for path in (tmp_path / "run/tiny").glob("checkpoint-*")}
    assert saved == {"checkpoint-1", "checkpoint-2"}
