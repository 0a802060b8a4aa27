"""The interface of the backends: what it finds, how a mechanism is turned off; none changes a result."""

import importlib

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.backends import OPERATIONS, disable, disabled, find, mechanisms, number, substituted
from grpo_fn.trees import map_arrays
from tests.support.closeness import assert_same_figures, assert_same_gradients
from tests.support.generating import EOS, EQUAL, RAGGED, assert_same, assert_teacher_forced, roll
from tests.support.naive_learner import (
    SPECS,
    grad_step_of,
    make_batch,
    make_state,
    mean_gradient,
    near_policy,
)
from tests.support.tiny_policies import tiny_policy

FOLDERS = ("cpu", "cuda")


@pytest.fixture(autouse=True)
def _all_on():
    """Whatever a test turns off is on again afterwards."""
    with substituted():
        yield


def table(folder):
    """The mechanisms of a backend."""
    return importlib.import_module(f"grpo_fn.backends.{folder}").MECHANISMS


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_entry_of_a_table_is_there(folder):
    """A known operation; a submodule that has the function, and the predicate where one is named."""
    assert table(folder).keys() <= OPERATIONS.keys()
    for submodule, attribute, predicate in table(folder).values():
        module = importlib.import_module(f"grpo_fn.backends.{folder}.{submodule}")
        assert hasattr(module, attribute) and (not predicate or callable(getattr(module, predicate)))


def test_every_operation_has_a_backend():
    """A name that no backend computes would never be found."""
    assert set().union(*map(table, FOLDERS)) == OPERATIONS.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_backends_numbers_are_known_ones(folder):
    assert importlib.import_module(f"grpo_fn.backends.{folder}").NUMBERS.keys() < mechanisms.NUMBERS.keys()


def test_an_unknown_name_is_an_error_with_the_nearest():
    for call in (find, disable, lambda name: disabled(name).__enter__()):
        with pytest.raises(ValueError, match="no mechanism 'softmx'; the nearest name is 'softmax'"):
            call("softmx")


def test_a_device_without_a_folder_has_the_composed_forms(monkeypatch):
    """Metal; and a backend whose folder was deleted."""
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
    """Until the end of the block, also after an error; `disable` for good."""
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


@pytest.mark.parametrize("name", ["llama", "qwen2", "nanochat", "cohere"])
@pytest.mark.parametrize("prompts", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_a_rollout_is_the_same_without_any_mechanism(name, prompts):
    """Tokens, ends and log-probs to rounding."""
    options = {"generations": 4, "limit": 10, "eos_ids": EOS, "check_every": 1}
    policy = tiny_policy(name)
    ours = roll(policy, prompts, sampling=g.Sampling(min_p=1e-6), **options)
    with disabled(*OPERATIONS):
        plain = tiny_policy(name)
        assert not plain.supports_compiled_decode and type(plain.module) is type(policy.module)
        # Another sampling that draws the same: each distribution is compiled once a process.
        composed = roll(plain, prompts, sampling=g.Sampling(min_p=2e-6), **options)
        assert_teacher_forced(plain, composed)
    assert_same(ours, composed)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "nanochat"])
def test_a_gradient_is_the_same_without_any_mechanism(name, compile):
    """Of the whole loss, in every leaf, and the statistics beside it."""
    policy, spec = tiny_policy(name), SPECS["token_mean"]
    batch = near_policy(make_batch(), policy)

    def gradient(policy):
        state, stats = grad_step_of(policy, spec, compile=compile)(make_state(policy), batch)
        mx.eval(state.accum_grads)
        return mean_gradient(state), map_arrays(lambda a: a.item(), stats)

    wanted, wanted_stats = gradient(policy)
    with disabled(*OPERATIONS):
        found, stats = gradient(tiny_policy(name))
    assert_same_gradients(found, wanted)
    assert_same_figures(stats, wanted_stats, ["loss"])
