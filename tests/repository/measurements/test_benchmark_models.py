"""What benchmarks measure on and how they show it: models of given shapes, their work, tables and charts."""

import pytest

from benchmarks.harness.machine import Rates
from benchmarks.harness.rooflines import Work, decode_seconds
from benchmarks.harness.shapes import make_module


def test_the_work_of_a_model_is_counted_from_its_leaves():
    """Hand-counted for two layers of 64 with one head of 32 for keys and values, gates of 128, tied."""
    work = Work.of(make_module("tiny"))
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128  # q and o, k and v, the three of the gate
    assert work.weights == 2 * layer + 512 * 64 and work.weight_bytes == 4 * work.weights
    assert (work.cache_bytes, work.scores, work.score_flops) == (2 * 2 * 32 * 4, 4, 4 * 32)
    assert work.exps == 2 * 128 + 512
    assert work.flops(10, 5) == 10 * (2 * work.weights + 4 * 5 * 128)


def test_the_floor_of_decoding_is_what_must_be_read_or_computed():
    """Bytes on a GPU: weights each step, prompts as often as they are held, half of what is drawn a row."""
    work = Work(weights=100, weight_bytes=400, cache_bytes=10, scores=2, score_flops=8, exps=5)
    speed = Rates(matmul=1e3, exp=1e2, copy=1.0, read=1e3)
    shape = {"rows": 6, "steps": 4, "prompt": 7}
    read = 4 * (400 + 10 * (2 * 7 + 6 * 4 / 2)) / 1e3
    assert decode_seconds(work, speed, **shape, prefixes=2, on_cpu=False) == pytest.approx(read)
    tokens, behind = 24, 7 + 2
    computed = tokens * (200 + 2 * behind * 8) / 1e3 + tokens * (5 + 2 * behind) / 1e2
    assert computed > read
    assert decode_seconds(work, speed, **shape, prefixes=2, on_cpu=True) == pytest.approx(computed)
