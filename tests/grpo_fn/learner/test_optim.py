"""Learning-rate schedules, number by number, and what the optimizer refuses."""

import math

import mlx.core as mx
import pytest

import grpo_fn as g


def values(schedule, count):
    """The first `count` learning rates."""
    return [schedule(mx.array(u, mx.int32)).item() for u in range(count)]


def expected(kind, rate, total, ratio, count):
    """The schedule as its docstring states it, in float64."""
    warmup = round(total * ratio)
    out = []
    for u in range(count):
        share = min((u - warmup) / max(total - warmup, 1), 1.0)
        if u < warmup:
            out.append(rate * (u + 1) / (warmup + 1))
        elif kind == "cosine":
            out.append(rate * 0.5 * (1 + math.cos(math.pi * share)))
        else:
            out.append(rate * (1 - share) if kind == "linear" else rate)
    return out


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(
    "total, ratio", [(10, 0.0), (10, 0.3), (7, 0.1), (1, 0.0), (1, 1.0), (5, 1.0), (200, 0.05)]
)
def test_warm_up_and_decay(kind, total, ratio):
    """Every update's rate, also past the end, agrees with the formula."""
    schedule = g.warmup_schedule(kind, 3e-4, total, ratio)
    want = expected(kind, 3e-4, total, ratio, total + 3)
    assert values(schedule, total + 3) == pytest.approx(want, rel=2e-6, abs=1e-10)


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: g.warmup_schedule("cosin", 1e-3, 10, 0.1), "did you mean 'cosine'"),
        (lambda: g.warmup_schedule("cosine", 1e-3, 0, 0.1), "total_updates = 0"),
        (lambda: g.warmup_schedule("cosine", 1e-3, 10, 1.5), "warmup_ratio = 1.5"),
        (lambda: g.warmup_schedule("cosine", -1e-3, 10, 0.1), "learning_rate = -0.001"),
        (lambda: g.adamw(-1.0), "learning_rate = -1.0"),
        (lambda: g.adamw(1e-3, betas=(0.9, 1.0)), "betas"),
        (lambda: g.adamw(1e-3, betas=(-0.1, 0.9)), "betas"),
        (lambda: g.adamw(1e-3, weight_decay=-0.1), "weight_decay = -0.1"),
        (lambda: g.adamw(1e-3, eps=0.0), "eps = 0.0"),
        (
            lambda: g.adamw(1e-3, moment_dtype=mx.float16),
            "moment_dtype = mlx.core.float16: expected float32 or",
        ),
    ],
)
def test_values_out_of_range_are_refused(make, word):
    """The message names the value that it found."""
    with pytest.raises(ValueError, match=word):
        make()


def test_init_shares_nothing_between_leaves_and_apply_changes_nothing_in_place():
    """The moments that went in are as they were: an update that is thrown away leaves no mark."""
    params = {"a": mx.array([1.0, 2.0]), "l": [{"w": mx.array([3.0])}]}
    optimizer = g.adamw(0.1)
    before = optimizer.init(params)
    grads = {"a": mx.array([1.0, -1.0]), "l": [{"w": mx.array([0.5])}]}
    numbers = optimizer.numbers(before, mx.array(0, mx.int32))
    new_params, after = optimizer.apply(grads, before, params, numbers, lambda new, old: new)
    mx.eval(new_params, after)
    assert before["a"]["m"].tolist() == [0.0, 0.0] and before["l"][0]["w"]["v"].tolist() == [0.0]
    assert params["a"].tolist() == [1.0, 2.0]
    assert after["a"]["m"].tolist() == pytest.approx([0.1, -0.1])
    assert after.keys() == before.keys() == {*params, "step"}
    assert before["step"].item() == 0 and after["step"].item() == 1, "what the moments have seen"
