"""What do few bits save on a real model, and how much do its log-probs differ from full precision?

The model is the one in the folder GRPO_REAL_MODEL. It completes packaged problems in full
precision. Three quarters of the completions provide the moments for calibrated rounding; everything
else is measured on the rest. At each of their positions, a token is sampled from μ, the
distribution of the rounded weights, with three seeds. *off* is the mean |log π − log μ| of these
tokens, and the *sample size* is the effective one of the weights π/μ. *KL* is KL(μ ‖ π) per token,
exact over the vocabulary. *First sync* is the time to round all weights once, including
compilation, and *sync* is the time of later syncs; *bits* is the average per rounded weight,
including scales.

*Rates* are of `g.generate` over rows, on a prompt of 8 tokens: *packed* computes with MLX's
quantized products for few rows and unpacks each weight for many, *dequantized* with the rounded weights.

**What limits it.** The contexts are from the model in full precision, not from the rounded model,
whose completions drift.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import peak_bytes, run_once, timed
from benchmarks.harness.record import Figure, sample_figure, time_figure
from benchmarks.harness.runs import REAL_MODEL
from benchmarks.rollout import as_a_run
from grpo_fn.policy import (
    STORAGES,
    QuantizedRole,
    formats_within,
    input_moments,
    quantized_role,
    rounding_effects,
)
from grpo_fn.policy.quantized_role import MODES
from grpo_fn.trees import Tree, materialize, named_leaves, nbytes
from runners.config.loading import load_config
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.data.row_files import Rows
from runners.machine import startup
from runners.models.loaded_model import load_model

CONFIG = Path(__file__).parent / "evidence" / "real_model.toml"
CALIBRATED = ("affine-4", "affine-6", "affine-3")
PARTS = ("rounding", "rates")
NEAREST = ("affine-8", "mxfp8", "mxfp4", "nvfp4")
SEEDS = 3
PROMPT = [*range(1, 9)]  # of the rates
# Rows decoded together, tokens of a completion at most, and seconds for one rate: slow formats draw fewer.
RATES, QUICK_RATES = ((1, 8, 128), 32, 2.0), ((1, 4), 4, 0.05)
AT_4_BITS, AT_5_BITS = (0.32, 0.11, 75.0), (0.21, 0.05, 90.0)  # targets: off, KL, sample size


@attrs.frozen(eq=False)
class Texts:
    """Rows of prompt and completion: rows for the moments, and rows for the measurements."""

    calibration_bl: mx.array
    lengths_b: mx.array
    held_out: Sequence[tuple[list[int], list[int]]]


def own_texts(policy: g.Policy, prompts: Sequence[Sequence[int]], tokens: int, ends: frozenset[int]) -> Texts:
    """The model's completions of the prompts, up to this number of tokens; three quarters are for
    the moments.
    """
    sampling = g.Sampling(max_new_tokens=tokens, eos_ids=ends)
    rollout = g.generate(policy, policy.params, prompts, sampling, key=mx.random.key(0), decoding=as_a_run())
    batch = g.make_batch(rollout, mx.zeros((len(prompts), 1)))
    part = 3 * len(prompts) // 4
    rows: Any = zip(rollout.tokens_bt.tolist(), rollout.lengths_b.tolist(), strict=True)  # type: ignore[arg-type]
    drawn = [row[:length] for row, length in rows]
    return Texts(
        batch.tokens_bl[:part],
        (batch.prompt_lengths_b + rollout.lengths_b)[:part],
        [(list(prompts[row]), drawn[row]) for row in range(part, len(prompts))],
    )


def log_probs(policy: g.Policy, params: Tree, texts: Texts) -> list[mx.array]:
    """The complete distributions at each position of the held-out completions, a matrix [T,V] for
    each completion.
    """
    found = []
    for prompt, drawn in texts.held_out:
        z_tv = policy.logits(params, mx.array([prompt + drawn]))[0, len(prompt) - 1 : -1].astype(mx.float32)
        found.append(z_tv - mx.logsumexp(z_tv, axis=-1, keepdims=True))
        mx.eval(found[-1])
    return found


def apart(
    title: str, full: Sequence[mx.array], low: Sequence[mx.array], texts: Texts, targets: Sequence[float] = ()
) -> list[Figure]:
    """The perplexity of the distributions `low`, and their off, KL and sample size relative to
    `full`.
    """
    off: list[float] = []
    sizes: list[float] = []
    for seed in range(SEEDS):
        differences = []
        for row, (p_tv, q_tv) in enumerate(zip(full, low, strict=True)):
            key = mx.random.key(1000 * seed + row)
            chosen_t1 = mx.random.categorical(q_tv, key=key)[:, None]
            differences.append(mx.take_along_axis(p_tv - q_tv, chosen_t1, axis=-1)[:, 0])
        d_n = mx.concatenate(differences)
        weights_n = mx.exp(d_n)
        off.append(float(mx.abs(d_n).mean()))
        sizes.append(100 * float(mx.square(weights_n.mean()) / mx.square(weights_n).mean()))
    sums = [float((mx.exp(q) * (q - p)).sum()) for p, q in zip(full, low, strict=True)]
    most_off, most_kl, least_size = targets or (None, None, None)
    kl = sum(sums) / sum(p.shape[0] for p in full)
    mean_off, mean_size = statistics.fmean(off), statistics.fmean(sizes)
    tokens = mx.concatenate([mx.array(drawn) for _, drawn in texts.held_out])
    own = mx.take_along_axis(mx.concatenate(list(low)), tokens[:, None], axis=-1).mean()
    return [
        Figure(f"{title}: perplexity", float(mx.exp(-own))),
        sample_figure(f"{title}: off", off, "nats", value=mean_off, at_most=most_off),
        Figure(f"{title}: KL", kl, "nats", at_most=most_kl),
        sample_figure(f"{title}: sample size", sizes, "%", value=mean_size, at_least=least_size),
    ]


def roles(policy: g.Policy, texts: Texts, quick: bool) -> Iterator[tuple[str, QuantizedRole]]:
    """The roles that are measured, with their titles."""
    moments: dict[str, mx.array] = {}
    names = quantized_role(policy, "affine-4").names
    tokens_bl, lengths_b = texts.calibration_bl, texts.lengths_b

    def measure() -> dict[str, mx.array]:
        moments.update(input_moments(policy, policy.params, tokens_bl, lengths_b, names, 64))
        return moments

    seconds = run_once(measure)
    say(f"real_quant: moments of {int(lengths_b.sum())} tokens in {seconds:.1f} s")
    for name in CALIBRATED[: 1 if quick else None]:
        yield f"rounding: {name}, calibrated", quantized_role(policy, name, moments=moments)
        yield f"rounding: {name}, to nearest", quantized_role(policy, name)
    few = 2 if quick else 6
    usual = quantized_role(policy, "affine-4", moments=moments)
    key = mx.random.key(0)
    effects = rounding_effects(policy, policy.params, usual, tokens_bl[:few], lengths_b[:few], key)
    sizes = {name: leaf.size for name, leaf in named_leaves(policy.params).items()}
    for budget in (5.0, 4.6):
        formats = formats_within(effects, sizes, 4, 64, budget)
        role = quantized_role(policy, "affine-4", moments=moments, formats=formats)
        yield f"rounding: {budget:g} bits, calibrated", role
    for name in NEAREST[: 1 if quick else None]:
        yield f"rounding: {name}, to nearest", quantized_role(policy, name)


def measured(
    title: str, role: QuantizedRole, policy: g.Policy, full: Sequence[mx.array], texts: Texts
) -> list[Figure]:
    """All figures of a role."""
    bits = role.bits(policy.params)
    params: list[Tree] = []

    def round_all() -> Tree:
        params[:] = [role.transform(policy.params)]
        return params[0]

    first, later = run_once(round_all), timed(round_all, repeats=3, warmup=0)
    low = log_probs(role.policy, params[-1], texts)
    targets = ()
    if "calibrated" in title:
        targets = AT_4_BITS if bits == 4.5 else AT_5_BITS if 4.9 < bits < 5.1 else ()
    figures = apart(title, full, low, texts, targets)
    return [
        Figure(f"{title}: bits", bits),
        *figures,
        Figure(f"{title}: first sync", first, "s"),
        time_figure(f"{title}: sync", later),
    ]


def rates(title: str, policy: g.Policy, params: Tree, quick: bool) -> list[Figure]:
    """Tokens per second by rows (the better of two samples), the bytes of the weights, and the peak
    with the most rows.
    """
    batches, tokens, seconds = QUICK_RATES if quick else RATES

    def drawn(rows: int, tokens: int) -> Callable[[], g.Rollout]:
        sampling = g.Sampling(num_generations=rows, max_new_tokens=tokens)
        decoding = as_a_run()
        return lambda: g.generate(policy, params, [PROMPT], sampling, key=mx.random.key(0), decoding=decoding)

    few = max(2, tokens // 16)
    each = tokens
    figures = []
    for rows in batches:
        run_once(drawn(rows, few))  # traces
        step = run_once(drawn(rows, few)) / few
        each = max(few, min(tokens, int(seconds / step)))
        rate = rows * each / min(run_once(drawn(rows, each)) for _ in range(2))
        name, note = f"{title}: tokens/s at batch {rows}", f"{each} tokens a row"
        figures.append(Figure(name, rate, "tokens/s", note=note))
    weights = nbytes(params, policy.frozen)
    peak = weights + peak_bytes(drawn(batches[-1], each), warm=False)
    return [
        *figures,
        Figure(f"{title}: weights", weights / 1e6, "MB"),
        Figure(f"{title}: peak", peak / 1e6, "MB"),
    ]


def rates_of(policy: g.Policy, quick: bool) -> Iterator[list[Figure]]:
    """The rates of full precision, and of each format in both storages."""
    yield rates("rates: none", policy, policy.params, quick)
    for name, storage in itertools.product(["affine-8", "mxfp4"] if quick else MODES, STORAGES):
        say(f"real_quant: rates of {name}, {storage}")
        role = quantized_role(policy, name, storage)
        params = role.transform(policy.params)
        materialize(params)
        yield rates(f"rates: {name}, {storage}", role.policy, params, quick)


@benchmark("real_quant", parts=("parts",))
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part.")
def main(quick: bool, parts: Sequence[str]) -> Iterator[Sequence[Figure]]:
    """Measure a real model (GRPO_REAL_MODEL) in few bits: its log-probs by format and rounding."""
    folder = os.environ.get(REAL_MODEL, "embedded" if quick else "")
    if not folder:
        say(f"real_quant: skipped, because {REAL_MODEL} is not a folder")
        return
    config = load_config(str(CONFIG), [f"model.path={folder}", "data.source=embedded"])
    loaded = load_model(config.model, startup.prepare())
    policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    rows, _ = load_rows(config.data)
    count, tokens = (4, 8) if quick else (64, 128)
    examples, _ = build_examples(Rows(rows[:count]), config.data, loaded.tokenizer)
    prompts = [list(example.tokens) for example in examples]
    texts = own_texts(policy, prompts, tokens, frozenset(loaded.eos_ids))
    say(f"real_quant: {sum(len(drawn) for _, drawn in texts.held_out)} tokens of completions are measured")
    full = log_probs(policy, policy.params, texts)
    parts = parts or PARTS
    for title, role in roles(policy, texts, quick) if "rounding" in parts else ():
        say(f"real_quant: {title}")
        yield measured(title, role, policy, full, texts)
    if "rates" in parts:
        yield from rates_of(policy, quick)


if __name__ == "__main__":
    main()
