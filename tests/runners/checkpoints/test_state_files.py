"""The state is restored from its files bit for bit, with its structure."""

import json
import math
from pathlib import Path

import attrs
import mlx.core as mx
import pytest

from grpo_fn.learner.state import sync_old
from grpo_fn.trees import arrays_of, map_arrays, structure_of
from runners.checkpoints.checkpoint import load_trees, pack, unpack, write_checkpoint
from runners.config.sections import LoraConfig
from runners.errors import UserError
from runners.files.tensor_files import load_arrays, save_arrays
from tests.support.tiny_states import load, make_state, same_bits


@pytest.mark.parametrize(
    "changes", [{}, {"master": "bfloat16"}, {"tune": "lora"}, {"tune": "dora", "lora": LoraConfig(layers=1)}]
)
@pytest.mark.parametrize("reference", [True, False])
def test_the_state_is_restored_bit_for_bit(llama, tmp_path, changes, reference):
    """This includes containers and dtypes; layers without adapters stay empty list items."""
    loaded = load(llama.path, **changes)
    state = make_state(loaded, reference=reference)
    folder = write_checkpoint(tmp_path, 40, state, loaded, {})
    assert same_bits(load_trees(folder)[0], state)


def test_shared_roles_are_stored_once_and_shared_again(llama, tmp_path):
    """After a sync, old_params and params are one set of weights in memory and on disk."""
    state = sync_old(make_state(llama, reference=False))
    folder = write_checkpoint(tmp_path, 1, state, llama, {})
    back = load_trees(folder)[0]
    assert all(a is b for a, b in zip(arrays_of(back.params), arrays_of(back.old_params), strict=True))
    stored = mx.load(str(folder / "optimizer.safetensors"))
    assert not [name for name in stored if name.startswith(("params", "old_params"))]


def test_a_gradient_that_is_not_finite_is_restored(llama, tmp_path):
    """The update with this sum is then skipped, as without an interruption."""
    state = make_state(llama)
    state = attrs.evolve(state, accum_grads=map_arrays(lambda a: a * math.nan, state.accum_grads))
    assert same_bits(load_trees(write_checkpoint(tmp_path, 1, state, llama, {}))[0], state)


@pytest.mark.parametrize(
    "tree",
    [
        {"b": mx.array(1), "a": (mx.array(2), [mx.array(3)])},  # mx.save loses the tuple and the order
        [{}, [], (), None, {"x": None}],
        {"0": mx.array(1), "1": mx.array(2)},  # tree_unflatten makes a list of this
        [mx.array([-0.0]), mx.array([0.0, math.nan]), mx.array([True, False]), mx.zeros((0, 3))],
        [1, 0.1, "s", True],
        [mx.array([1.5], mx.bfloat16), mx.zeros((2, 2), mx.float16), mx.array([[1, 2], [3, 4]]).T],
    ],
)
def test_any_tree_keeps_its_structure(tmp_path, tree):
    """A file keeps containers, order, empty parts and scalars."""
    arrays = {}
    shape = json.loads(json.dumps(pack(tree, "tree", arrays, {})))
    save_arrays(tmp_path / "tree.safetensors", arrays, {})
    back = unpack(shape, load_arrays(tmp_path / "tree.safetensors")[0])
    left, right = [], []
    assert structure_of(back, left) == structure_of(tree, right)
    assert [bytes(memoryview(mx.contiguous(a))) for a in left] == [
        bytes(memoryview(mx.contiguous(a))) for a in right
    ]


def spoil(file, part):
    """Adds a NaN to the first array whose name contains `part`."""
    arrays, metadata = load_arrays(file)
    name = next(name for name in arrays if part in name)
    save_arrays(file, {**arrays, name: arrays[name] + math.nan}, metadata)


STATE, WEIGHTS = "optimizer.safetensors", "model.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (STATE, Path.unlink, "optimizer.safetensors: cannot be read"),
        (WEIGHTS, Path.unlink, "its structure is damaged \\(KeyError: 'weights:"),
        (STATE, lambda f: f.write_bytes(f.read_bytes()[:-9]), "optimizer.safetensors: cannot be read"),
        (WEIGHTS, lambda file: spoil(file, "layers.0"), "the weight weights:.* contains NaN"),
        (STATE, lambda file: spoil(file, "opt_state"), "the weight opt_state.* contains"),
    ],
)
def test_a_damaged_state_is_named(llama, tmp_path, name, damage, message):
    """The error names the file that is missing or truncated, or the weight that is not finite."""
    folder = write_checkpoint(tmp_path, 1, make_state(llama), llama, {})
    damage(folder / name)
    with pytest.raises(UserError, match=message):
        load_trees(folder)
