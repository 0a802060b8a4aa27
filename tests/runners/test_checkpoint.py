"""Checkpoints: mlx-lm opens them, the state comes back bit for bit, a crash costs at most the newest one."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import attrs
import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from grpo_fn.optim import adamw
from grpo_fn.policy import Policy
from grpo_fn.state import init_state, sync_old
from grpo_fn.trees import arrays_of, map_arrays, structure_of
from runners import durable
from runners.checkpoint import list_checkpoints, prune_checkpoints, save_checkpoint, save_final
from runners.errors import UserError
from runners.models import flat, load_model
from runners.platform import Platform
from runners.sections import LoraConfig, ModelConfig
from runners.state_files import load_state, pack, unpack
from tests.tiny_models import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
QUANTIZED = {"group_size": 32, "bits": 4}
TOKENS = mx.array([[5, 9, 70, 31, 12]])


def load(path, **changes):
    """Loads for a CPU run with the config's defaults but for `changes`."""
    return load_model(attrs.evolve(ModelConfig(path=str(path)), **changes), Platform(backend="cpu"))


def moved(tree, seed):
    """The tree with noise on every array, so that no two roles are equal by chance."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    return map_arrays(lambda a: a + 0.02 * mx.random.normal(a.shape, key=next(keys)).astype(a.dtype), tree)


def make_state(loaded, *, seed=1, reference=True):
    """A state in the middle of a run: moments, accumulated gradients and three policies that differ."""
    params = Policy.from_module(loaded.module).params
    state = init_state(params, adamw(1e-3), key=mx.random.key(seed), ref_params=params if reference else None)
    return attrs.evolve(
        state,
        params=moved(params, seed),
        opt_state=moved(state.opt_state, seed + 1),
        accum_grads=moved(params, seed + 2),
        accum_weight=mx.array(1234.5),
        step=mx.array(40, mx.int32),
        update_step=mx.array(20, mx.int32),
    )


def same_bits(first, second):
    """Equal structure, dtypes and bits, NaN and -0.0 included."""
    left, right = [], []
    if structure_of(attrs.asdict(first, recurse=False), left) != structure_of(
        attrs.asdict(second, recurse=False), right
    ):
        return False
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bytes(memoryview(a)) == bytes(memoryview(b))
        for a, b in zip(left, right, strict=True)
    )


def logits(loaded, state):
    """What the model computes with the state's parameters; the module is left as it was."""
    before = loaded.module.parameters()
    loaded.module.update(state.params)
    result = loaded.module(TOKENS)
    loaded.module.update(before)
    return result


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A loaded llama whose file is bfloat16."""
    return load(make_model_folder(tmp_path_factory.mktemp("models") / "llama", dtype="bfloat16"))


@pytest.mark.parametrize("changes", [{}, {"tune": "lora"}, {"tune": "dora", "lora": LoraConfig(layers=1)}])
@pytest.mark.parametrize("reference", [True, False])
def test_the_state_comes_back_bit_for_bit(llama, tmp_path, changes, reference):
    """Every field, its containers and its dtypes; layers without adapters stay empty places in their list."""
    loaded = load(llama.path, **changes)
    state = make_state(loaded, reference=reference)
    folder = save_checkpoint(tmp_path, 40, state, loaded, {})
    assert same_bits(load_state(folder), state)


def test_shared_roles_come_back_shared_and_are_stored_once(llama, tmp_path):
    """old = params right after a sync: one set of weights in memory and on disk, in the weights file."""
    state = sync_old(make_state(llama, reference=False))
    folder = save_checkpoint(tmp_path, 1, state, llama, {})
    back = load_state(folder)
    assert all(a is b for a, b in zip(arrays_of(back.params), arrays_of(back.old_params), strict=True))
    stored = mx.load(str(folder / "optimizer.safetensors"))
    assert not [name for name in stored if name.startswith(("params", "old_params"))]


def test_gradients_of_nothing_but_zeros_take_no_space(llama, tmp_path):
    """Between updates the accumulated gradients are zeros; they come back without having been written."""
    params = make_state(llama).params
    state = init_state(params, adamw(1e-3), key=mx.random.key(0))
    folder = save_checkpoint(tmp_path, 1, state, llama, {})
    assert (folder / "optimizer.safetensors").stat().st_size < (
        folder / "model.safetensors"
    ).stat().st_size / 4
    assert same_bits(load_state(folder), state)


@pytest.mark.parametrize(
    "tree",
    [
        {
            "b": mx.array(1),
            "a": (mx.array(2), [mx.array(3)]),
        },  # mx.save's own names lose the tuple and the order
        [{}, [], (), None, {"x": None}],
        {"0": mx.array(1), "1": mx.array(2)},  # tree_unflatten makes a list of this
        [
            mx.array([-0.0]),
            mx.array([0.0, math.nan]),
            mx.array([True, False]),
            mx.zeros((0, 3)),
            1,
            0.1,
            "s",
            True,
        ],
        [mx.array([1.5], mx.bfloat16), mx.zeros((2, 2), mx.float16), mx.array([[1, 2], [3, 4]]).T],
    ],
)
def test_any_tree_keeps_its_shape(tmp_path, tree):
    """Containers, order, empty places and scalars are kept, through a file."""
    arrays = {}
    shape = json.loads(json.dumps(pack(tree, "tree", arrays, {})))
    durable.save_arrays(tmp_path / "tree.safetensors", arrays, {})
    back = unpack(shape, durable.load_arrays(tmp_path / "tree.safetensors")[0])
    left, right = [], []
    assert structure_of(back, left) == structure_of(tree, right)
    assert [bytes(memoryview(mx.contiguous(a))) for a in left] == [
        bytes(memoryview(mx.contiguous(a))) for a in right
    ]


def test_what_cannot_be_written_is_refused_by_name():
    """Names that collide and values of other types are errors, not losses."""
    with pytest.raises(ValueError, match=r"two arrays are named t\.a\.b"):
        pack({"a.b": mx.array(1), "a": {"b": mx.array(2)}}, "t", {}, {})
    with pytest.raises(TypeError, match=r"t\.a: cannot write a set"):
        pack({"a": set()}, "t", {}, {})
    with pytest.raises(TypeError, match="the key 3 is not a string"):
        pack({3: mx.array(1)}, "t", {}, {})


def test_a_checkpoint_holds_the_contracts_files_and_opens_as_a_model(llama, tmp_path):
    """The names of the contract; mlx-lm loads the folder, with the float32 weights that were trained."""
    state = make_state(llama)
    folder = save_checkpoint(tmp_path, 40, state, llama, {"em": 0.5, "loss": math.nan})
    assert folder == tmp_path / "checkpoint-40"
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "optimizer.safetensors",
        "trainer_state.json",
    }
    assert json.loads((folder / "trainer_state.json").read_text()) == {
        "step": 40,
        "em": 0.5,
        "loss": None,
        "nonfinite": ["loss"],
    }
    module, tokenizer = mlx_lm.load(str(folder))
    assert all(
        mx.array_equal(flat(module.parameters())[name], leaf) for name, leaf in tree_flatten(state.params)
    )
    assert tokenizer.encode("<answer>9") == llama.tokenizer.encode("<answer>9")


def test_final_has_the_dtypes_of_the_source(llama, tmp_path):
    """final/ of a bfloat16 model is bfloat16 again, each trained weight rounded once."""
    state = make_state(llama)
    final = save_final(tmp_path, state, llama)
    module, _ = mlx_lm.load(str(final))
    weights = flat(module.parameters())
    assert {leaf.dtype for leaf in weights.values()} == {mx.bfloat16}
    assert all(
        mx.array_equal(weights[name], leaf.astype(mx.bfloat16)) for name, leaf in tree_flatten(state.params)
    )


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tune", ["lora", "dora"])
@pytest.mark.parametrize("quantize", [None, QUANTIZED])
def test_adapters_open_in_mlx_lm_and_final_has_them_merged(tmp_path, arch, tune, quantize):
    """The trained logits come out of base + adapters (checkpoint and final) and of final/ alone."""
    base = make_model_folder(tmp_path / "base", arch, quantize=quantize)
    loaded = load(base, tune=tune, lora=LoraConfig(rank=4, layers=1))
    state = make_state(loaded)
    before = flat(loaded.module.parameters())
    wanted = logits(loaded, state)
    checkpoint = save_checkpoint(tmp_path / "run", 1, state, loaded, {})
    final = save_final(tmp_path / "run", state, loaded)
    assert all(leaf is before[name] for name, leaf in flat(loaded.module.parameters()).items())

    for folder in (checkpoint, final):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["fine_tune_type"], config["model"]) == (tune, str(base))
        module, _ = mlx_lm.load(config["model"], adapter_path=str(folder))
        assert mx.allclose(module(TOKENS), wanted, rtol=1e-5, atol=1e-5)
    assert not (checkpoint / "model.safetensors").exists()
    module, _ = mlx_lm.load(str(final))
    assert mx.allclose(module(TOKENS), wanted, rtol=1e-3, atol=1e-3)
    assert not mx.allclose(mlx_lm.load(str(base))[0](TOKENS), wanted, rtol=1e-2, atol=1e-2)


def test_layers_that_the_config_names_one_by_one_are_merged_too(tmp_path):
    """A config may say for each layer how it is packed; final/ says of the merged ones that they are not."""
    base = make_model_folder(tmp_path / "base", quantize=QUANTIZED)
    config = json.loads((base / "config.json").read_text())
    config["quantization"]["model.layers.1.self_attn.q_proj"] = QUANTIZED
    (base / "config.json").write_text(json.dumps(config))
    loaded = load(base, tune="lora")
    state = make_state(loaded)
    module, _ = mlx_lm.load(str(save_final(tmp_path / "run", state, loaded)))
    assert mx.allclose(module(TOKENS), logits(loaded, state), rtol=1e-3, atol=1e-3)


def test_saving_works_when_the_module_is_an_empty_skeleton(tmp_path):
    """The weights come from the state and the loaded leaves: what stands in the module does not matter."""
    loaded = load(make_model_folder(tmp_path / "base"), tune="lora")
    state = make_state(loaded)
    wanted = logits(loaded, state)
    loaded.module.update(map_arrays(lambda a: mx.array(0.0), loaded.module.parameters()))
    module, _ = mlx_lm.load(str(save_final(tmp_path / "run", state, loaded)))
    assert mx.allclose(module(TOKENS), wanted, rtol=1e-4, atol=1e-4)


def test_a_folder_may_be_saved_over_the_one_it_was_loaded_from(tmp_path):
    """Training on from final/ into the same final/: the old files are read before they are replaced."""
    first = load(make_model_folder(tmp_path / "base"))
    final = save_final(tmp_path / "run", make_state(first, seed=1), first)
    second = load(final)
    state = make_state(second, seed=2)
    save_final(tmp_path / "run", state, second)
    weights = flat(mlx_lm.load(str(final))[0].parameters())
    assert all(mx.array_equal(weights[name], leaf) for name, leaf in tree_flatten(state.params))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["final"]


KILLED = """
import os, sys
from pathlib import Path
from runners import durable
target, moment = Path(sys.argv[1]), sys.argv[2]
def die(*_): os._exit(9)
rename, count = os.rename, 0
def rename_once(a, b):
    if str(b) == str(target): die()
    rename(a, b)
if moment == "writing": durable._flush = die
else: os.rename = rename_once
with durable.new_folder(target) as folder:
    (folder / "content").write_text("new")
"""


@pytest.mark.parametrize("moment", ["writing", "between the renames"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_kill_leaves_the_old_folder_or_none(tmp_path, moment, exists):
    """Killed before the new folder has its name: the old one is there, and the next save cleans up."""
    target = tmp_path / "checkpoint-5"
    if exists:
        target.mkdir()
        (target / "content").write_text("old")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(target), moment],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == 9
    assert not target.exists() or (target / "content").read_text() == "old"
    assert len(list(tmp_path.iterdir())) > exists  # the debris of the killed process

    with durable.new_folder(tmp_path / "checkpoint-6") as folder:
        (folder / "content").write_text("newer")
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-6",
        *(["checkpoint-5"] if exists else []),
    }
    assert not exists or (target / "content").read_text() == "old"


def test_a_full_disk_is_a_user_error_and_keeps_the_old_checkpoint(llama, tmp_path, monkeypatch):
    """The message names the folder; nothing half-written stays; the old checkpoint does."""
    state = make_state(llama, seed=1)
    folder = save_checkpoint(tmp_path, 5, state, llama, {})

    def full(*_args, **_keywords):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("runners.state_files.save_arrays", full)
        with pytest.raises(UserError, match=r"checkpoint-5: cannot be written: No space left on device"):
            save_checkpoint(tmp_path, 5, make_state(llama, seed=9), llama, {})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]
    assert same_bits(load_state(folder), state)


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """The order is: each file, the folder, then the rename, then the parent."""
    log = []
    rename, fsync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda a, b: log.append("rename") or rename(a, b))
    monkeypatch.setattr(
        os, "fsync", lambda fd: log.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd)
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell which file a descriptor is")
    with durable.new_folder(tmp_path / "made") as folder:
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")
    assert set(log[:2]) == {"one", "two"}
    assert log[2].startswith(".made.new-")
    assert log[3:] == ["rename", tmp_path.name]


def test_loaded_arrays_do_not_change_with_their_file(tmp_path):
    """mx.load is lazy and would read what lies there later: here it has been read."""
    file = tmp_path / "a.safetensors"
    durable.save_arrays(file, {"a": mx.ones((4096,))}, {})
    arrays, _ = durable.load_arrays(file)
    with open(file, "r+b") as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        stream.seek(size - 4096)
        stream.write(b"\xff" * 4096)
    assert mx.array_equal(arrays["a"], mx.ones((4096,)))


def fake_checkpoints(run_dir, states):
    """Folders with a trainer_state.json alone, which is all that pruning reads."""
    for step, state in states.items():
        (run_dir / f"checkpoint-{step}").mkdir()
        (run_dir / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [
        (0, 0, [2, 9, 10, 11, 100]),
        (2, 0, [11, 100]),
        (0, 1, [9, 100]),  # the newest stays though it is not the best
        (1, 2, [9, 10, 100]),  # em 0.7 with the higher reward before em 0.7
        (1, 3, [9, 10, 11, 100]),
        (9, 9, [2, 9, 10, 11, 100]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep_last, keep_best, kept):
    """Steps count as numbers; em ranks before reward; a null ranks last; other folders are let be."""
    fake_checkpoints(
        tmp_path,
        {
            2: {"em": 0.1, "reward": 9.0},
            9: {"em": 0.9, "reward": 1.0},
            10: {"em": 0.7, "reward": 2.0},
            11: {"em": 0.7, "reward": None},
            100: {"em": None, "reward": 3.0},
        },
    )
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "final").mkdir()
    gone = prune_checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
    assert [int(folder.name.split("-")[1]) for folder in list_checkpoints(tmp_path)] == kept
    assert {folder.name for folder in gone} == {
        f"checkpoint-{step}" for step in {2, 9, 10, 11, 100} - {*kept}
    }
    assert (tmp_path / "checkpoint-best").is_dir() and (tmp_path / "final").is_dir()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors: cannot be read"),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            "the array 'weights:.*' of the training state",
        ),
        (
            lambda folder: (folder / "optimizer.safetensors").write_bytes(
                (folder / "optimizer.safetensors").read_bytes()[:-9]
            ),
            "optimizer.safetensors: cannot be read",
        ),
        (
            lambda folder: durable.save_arrays(
                folder / "optimizer.safetensors", {}, {"format": "grpo_fn.state", "version": "99"}
            ),
            "found grpo_fn.state version 99, wanted grpo_fn.state version 1",
        ),
    ],
)
def test_a_damaged_state_is_named(llama, tmp_path, damage, message):
    """Missing, cut off, of a later format: one line that says which."""
    folder = save_checkpoint(tmp_path, 1, make_state(llama), llama, {})
    damage(folder)
    with pytest.raises(UserError, match=message):
        load_state(folder)
