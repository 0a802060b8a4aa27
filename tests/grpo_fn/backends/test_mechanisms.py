"""The backends' interface: what it finds, how mechanisms are turned off, and that none changes a result."""

import importlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from grpo_fn.backends import (
    OPERATIONS,
    SWITCHES,
    disable,
    disabled,
    disabled_names,
    enabled,
    find,
    mechanisms,
    number,
    substituted,
)
from grpo_fn.learner import optimizer
from grpo_fn.learner.logprobs.token_logprobs import chunk_rows
from grpo_fn.policy.caches import prefix_cache
from grpo_fn.policy.decode_weights import mergeable, unpackable
from grpo_fn.policy.layers import gated_delta, patched_layers, quantized_layers
from grpo_fn.rollout import decode_loop
from grpo_fn.rollout.decode_step import RowBatch
from grpo_fn.trees import map_arrays
from tests.support.closeness import assert_same_figures, assert_same_gradients, assert_same_weights
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.naive_learner import (
    SPECS,
    grad_step_of,
    make_batch,
    make_state,
    mean_gradient,
    near_policy,
)
from tests.support.tiny_policies import lora_policy, tiny_policy, token_rows

FOLDERS = ("cpu", "cuda")


@pytest.fixture(autouse=True)
def _all_on():
    """Mechanisms that a test turns off are on again afterwards."""
    with substituted():
        yield


def table(folder):
    """The mechanisms of a backend."""
    return importlib.import_module(f"grpo_fn.backends.{folder}").MECHANISMS


def test_every_entry_of_a_table_is_there():
    """Each operation has its function, and its predicate if it names one; no table has an unknown name."""
    for folder in FOLDERS:
        for submodule, attribute, predicate in table(folder).values():
            module = importlib.import_module(f"grpo_fn.backends.{folder}.{submodule}")
            assert hasattr(module, attribute) and (not predicate or callable(getattr(module, predicate)))
        numbers = importlib.import_module(f"grpo_fn.backends.{folder}").NUMBERS
        assert numbers.keys() < mechanisms.NUMBERS.keys()
    assert set().union(*map(table, FOLDERS)) == OPERATIONS.keys()


def test_an_unknown_name_is_an_error_with_the_nearest():
    for call in (find, disable, lambda name: disabled(name).__enter__()):
        with pytest.raises(ValueError, match="no mechanism 'softmx'; the nearest name is 'softmax'"):
            call("softmx")
    with pytest.raises(ValueError, match="no mechanism 'row_compation'; the nearest name is 'row_compac"):
        enabled("row_compation")
    assert not SWITCHES.keys() & OPERATIONS.keys()


def test_a_device_without_a_folder_has_the_composed_forms(monkeypatch):
    """Metal has none, and a backend's folder may have been deleted."""
    x = mx.zeros((2, 3))
    mechanisms._folder.cache_clear()
    mechanisms.load.cache_clear()
    for device in ("metal", "deleted"):
        monkeypatch.setattr(mechanisms, "backend", lambda device=device: device)
        monkeypatch.setattr(mechanisms, "_FOLDERS", ("cpu", "cuda", "deleted"))
        assert find("softmax", x) is None and find("decode_blocks") is None and number("unpack_rows") == 0
    mechanisms._folder.cache_clear()
    mechanisms.load.cache_clear()


def test_what_is_disabled_is_not_found():
    """`disabled` lasts until the end of its block, also after an error; `disable` is permanent."""
    with substituted(exp=mx.exp, softmax=None):
        assert find("exp", mx.zeros(3, mx.bfloat16)) is mx.exp
        with pytest.raises(RuntimeError, match="stop"), disabled("exp", "softmax"):
            assert find("exp", mx.zeros(3)) is None and find("softmax", mx.zeros(3)) is None
            raise RuntimeError("stop")
        assert find("exp", mx.zeros(3)) is mx.exp
    disable("exp")
    assert find("exp", mx.zeros(3)) is None


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="the CPU's mechanisms")
def test_a_predicate_decides_by_the_arguments():
    """The CPU's functions are for float32."""
    assert find("exp", mx.zeros(3)) is not None and find("exp", mx.zeros(3, mx.float16)) is None


def packed_policy():
    """Adapters on a 4-bit base."""
    return lora_policy(packed=True, intermediate_size=64)


MODELS = {name: partial(tiny_policy, name) for name in ("llama", "nanochat", "cohere")}
MODELS |= {"lora": lora_policy, "packed": packed_policy}
OFF = pytest.mark.parametrize("off", [OPERATIONS, SWITCHES], ids=["operations", "switches"])


@OFF
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_a_rollout_is_the_same_without_mechanisms(make, prompts, off):
    """Tokens and ends are equal, log-probs equal to rounding."""
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    policy = make()
    ours = roll(policy, prompts, sampling=g.Sampling(min_p=1e-6), **options)
    with disabled(*off):
        plain = make()
        # Another sampling that draws the same: each distribution is compiled once a process.
        composed = roll(plain, prompts, sampling=g.Sampling(min_p=2e-6), **options)
        assert_teacher_forced(plain, composed)
    assert_same(ours, composed)


@OFF
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("compile", [False, True])
def test_a_gradient_and_its_update_are_the_same_without_mechanisms(make, compile, off):
    """Every leaf and statistic of a gradient over micro-batches, and its update."""
    policy, spec = make(), SPECS["token_mean"]
    batch = near_policy(make_batch(zeros=True), policy)

    def gradient(policy):
        pieces = g.split_batch(g.drop_inactive(batch, spec), max_tokens=40)
        state, stats = grad_step_of(policy, spec, compile=compile)(make_state(policy), pieces)
        after, _ = g.make_update_step(g.adamw(1e-3), compile=compile)(state)
        mx.eval(state.accum_grads, after.params)
        return mean_gradient(state), after.params, map_arrays(lambda a: a.item(), stats)

    expected, expected_params, expected_stats = gradient(policy)
    with disabled(*off):
        found, params, stats = gradient(make())
    assert_same_gradients(found, expected)
    assert_same_weights(params, expected_params, policy.params)
    assert_same_figures(stats, expected_stats, ["loss"])


ON_CPU = mx.default_device() == mx.cpu


def counts(monkeypatch, owner, name, act):
    """The number of times that `act` calls a function."""
    real, found = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *a, **k: found.append(1) or real(*a, **k))
    act()
    return len(found)


def update():
    """An update of a state."""
    mx.eval(g.make_update_step(g.adamw(1e-3), compile=False)(make_state(tiny_policy()))[0].params)


def delta():
    """A forward pass of a model with a gated delta."""
    policy = g.Policy.from_module(small_model("qwen3_next"))
    mx.eval(policy.hidden(policy.params, token_rows(1, 4)))


def ended_row():
    """A batch in which one row has ended."""
    steps: Any = SimpleNamespace(drops_rows=True)
    bits = mx.zeros((4, 2, 3), mx.uint32)
    batch = RowBatch(steps, mx.zeros((2, 3)), bits, [0, 1])
    batch.alive.remove(0)
    return batch


def active_rows():
    """The number of active rows in a batch of six."""
    return g.drop_inactive(make_batch(zeros=True), SPECS["grpo"]).mask_bt.shape[0]


ACTS = {  # whether the mechanism does something now
    "patched_layers": lambda _: patched_layers.patch_layers(tiny_policy().module) > 0,
    "shared_prefix": lambda _: prefix_cache.sharing_pays(),
    "row_compaction": lambda _: decode_loop.compacts(ended_row()),
    "merged_adapters": lambda _: bool(mergeable(lora_policy().module)),
    "unpacked_weights": lambda _: bool(unpackable(packed_policy().module)),
    "unpacked_products": lambda _: quantized_layers.unpack_rows() > 0,
    "logit_chunks": lambda _: chunk_rows(50_000) < 10_000,
    "inactive_rows": lambda _: active_rows() < 6,
    "leafwise_update": lambda patch: counts(patch, optimizer.mx, "depends", update),
    "chunked_gated_delta": lambda patch: counts(patch, gated_delta, "chunked_gated_delta", delta),
}
# Those of the shell have their tests beside their code.
OF_THE_SHELL = {"programs_ahead", "checkpointed_mlps"}
BY_DEVICE = {"shared_prefix", "unpacked_weights", "unpacked_products"}  # what a CPU and CUDA do


@pytest.mark.parametrize("name", sorted(SWITCHES.keys() - OF_THE_SHELL))
def test_a_switch_turns_its_mechanism_off(name, monkeypatch):
    """The mechanism acts outside of the block and not inside."""
    if ON_CPU or name not in BY_DEVICE:
        assert enabled(name) and ACTS[name](monkeypatch)
    monkeypatch.undo()
    with disabled(name):
        assert not enabled(name) and disabled_names() == (name,) and not ACTS[name](monkeypatch)
    assert enabled(name) and disabled_names() == ()
