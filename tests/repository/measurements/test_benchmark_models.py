"""What benchmarks measure on and how they show it: models of given shapes, their work, tables and charts."""

import mlx.core as mx
import pytest

from benchmarks.harness import plots
from benchmarks.harness.machine import Rates
from benchmarks.harness.record import Figure, grid, make_record
from benchmarks.harness.rooflines import Work, decode_seconds
from benchmarks.harness.shapes import make_module, make_prompts


def made(name, figures):
    """A record with these (name, unit), whose values are 2, 3, 4, …"""
    values = [Figure(name=title, value=i + 2.0, unit=unit) for i, (title, unit) in enumerate(figures)]
    return make_record(name, values, quick=False, machine={}, rates={})


def test_a_grid_has_a_table_for_each_model():
    """MODEL: ROW: COLUMN; a row without a column's figure has an empty cell there."""
    figures = [("m: a: time", "s"), ("m: b: time", "s"), ("m: b: size", "MB"), ("n: a: time", "s")]
    text = grid(made("quant", figures))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert cells[0] == ["m", "time, s", "size, MB"]
    assert cells[2:4] == [["a", "2", ""], ["b", "3", "4"]]
    assert cells[4] == ["n", "time, s"] and cells[6] == ["a", "5"]


def test_a_chart_takes_the_figures_of_its_unit_and_pattern():
    """Bars by row and series, a panel for each model and chart; ratios and other units are not drawn."""
    figures = [("m: none: tokens/s at batch 1", "tokens/s"), ("m: none: tokens/s at batch 16", "tokens/s")]
    figures += [
        ("m: none: tokens/s at batch 99", "x"),
        ("m: none: weights", "MB"),
        ("m: mxfp4 dequantized: KL", "nats"),
    ]
    first, second = plots.panels({"cpu": made("quant", figures)})
    assert first.title.startswith("cpu, m") and first.rows == ["none"]
    assert first.series == ["batch 1", "batch 16"] and second.rows == ["mxfp4"]


def test_a_chart_is_a_file_that_does_not_change(tmp_path):
    """A result drawn twice gives the same SVG, with the bars' labels as text; nothing to draw, no file."""
    pytest.importorskip("matplotlib", reason="of the extra `bench`")
    records = {"cpu": made("loss", [("loss, grpo", "ms"), ("loss, gspo", "ms")])}
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    assert all(plots.draw(records, path) for path in paths)
    assert paths[0].read_bytes() == paths[1].read_bytes() and b">gspo<" in paths[0].read_bytes()
    assert not plots.draw({"cpu": made("loss", [("x", "ms")])}, tmp_path / "c.svg")
    assert not (tmp_path / "c.svg").exists()


def test_random_models_have_the_logits_of_a_trained_one():
    """A standard deviation of about 3, the same weights each time, the vocabulary that was asked for."""
    tokens = mx.arange(8, 72)[None]
    first, second = (make_module("tiny", vocab_size=640)(tokens) for _ in range(2))
    assert first.shape == (1, 64, 640) and mx.array_equal(first, second)
    assert 2.5 < mx.std(first).item() < 3.5


def test_ragged_prompts_have_the_total_of_equal_ones():
    """Lengths differ by up to the spread, and sum to the same."""
    lengths = [len(prompt) for prompt in make_prompts(16, 128, 512, spread=32)]
    assert sum(lengths) == 16 * 128 and (min(lengths), max(lengths)) == (96, 160)


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
