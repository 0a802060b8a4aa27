"""How many rows memory holds: bytes of a row against the model's own shapes, and what is free."""

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.trees import nbytes
from runners.machine import memory_readings
from runners.tuning import row_memory
from runners.tuning.row_memory import Workload
from tests.support.tiny_policies import VOCAB, tiny_module, tiny_policy


def work_of(policy, **changes):
    """Three prompts of 5, 9 and 3 tokens, two completions of 300 each."""
    values = {"lengths": (5, 9, 3), "num_generations": 2, "max_new_tokens": 300}
    return Workload(policy=policy, params=policy.params, **(values | changes))


def row_bytes(work):
    """The function under test, bound."""
    with work.policy.bound(work.params) as model:
        return row_memory.row_bytes(work, model)


LOGITS = VOCAB * 4 * (1 + 3)
TOKEN = 2 * 2 * 1 * 16 * 4  # keys and values × layers × heads × width × bytes: a token of llama's cache


def test_a_row_of_plain_caches():
    """Own tokens in buffers of 256, the prompt's share, twice for copies, and the logits."""
    policy = tiny_policy("llama")
    assert policy.shares_prefix
    assert row_bytes(work_of(policy)) == 2 * TOKEN * (512 + 256 / 2) + LOGITS
    assert row_bytes(work_of(policy, num_generations=8)) == 2 * TOKEN * (512 + 256 / 8) + LOGITS


def test_a_row_with_a_copy_of_its_prompt():
    """Where prompts are copied, a row holds prompt and completion in one buffer; a window bounds it."""
    policy = tiny_policy("gemma3")  # one of two layers has a window of 6
    assert not policy.shares_prefix
    assert row_bytes(work_of(policy, lengths=(213,))) == 2 * (TOKEN // 2) * (768 + 6) + LOGITS


def test_a_recurrent_state_does_not_grow():
    """Mamba's row is as large at ten times the length."""
    policy = tiny_policy("mamba")
    assert row_bytes(work_of(policy)) == row_bytes(work_of(policy, max_new_tokens=3000)) > LOGITS


def test_whole_groups_that_fit():
    """As many groups as 0.8 of the free bytes hold, one at least, all at most."""
    work = work_of(tiny_policy("llama"))
    group = 2 * row_bytes(work)
    with work.policy.bound(work.params) as model:
        counts = [
            row_memory.groups_that_fit(work, model, int(group * n / 0.8) + 1) for n in (0, 0.9, 1.99, 2, 50)
        ]
        assert row_memory.groups_that_fit(work, model, -5) == 1
    assert counts == [1, 1, 1, 2, 3]


def test_the_copy_in_the_compute_dtype_counts():
    """float32 weights computed in bfloat16 are there twice; in their own dtype once."""
    policy = g.Policy.from_module(tiny_module("llama"), compute_dtype=mx.bfloat16)
    assert row_memory.cast_bytes(work_of(policy)) == nbytes(policy.params) // 2
    assert row_memory.cast_bytes(work_of(tiny_policy("llama"))) == 0


@pytest.mark.parametrize(
    ("info", "limit", "free"),
    [
        ({"free_memory": 10**12}, 0.0, 90e9),
        ({"free_memory": 10**12}, 50.0, 40e9),
        ({"free_memory": 20 * 10**9}, 50.0, 23e9),  # MLX's cache of 3 GB can be used again
        ({"free_memory": 10**12, "max_recommended_working_set_size": 75 * 10**9}, 0.0, 65e9),
        ({"free_memory": 10**12}, 5.0, 0),
    ],
)
def test_what_is_free(monkeypatch, info, limit, free):
    """The least of the machine, MLX's limit and what other programs leave, less what is in use."""
    reading = memory_readings.MemoryReading(active=10 * 10**9, peak=0, cache=3 * 10**9, total=100 * 10**9)
    monkeypatch.setattr(memory_readings, "read_memory", lambda: reading)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory_readings.free_memory(limit) == free


def test_free_memory_of_this_machine():
    """Some of it, and not more than there is."""
    assert 0 < memory_readings.free_memory() <= memory_readings.read_memory().total
