"""Quantized roles: tokens per second, weight bytes, peak memory, and how far their log-probs are off.

Each mode in both storages, on models of several shapes. *Packed* computes with MLX's quantized products for
few rows and unpacks each weight for many; *dequantized* computes with the rounded weights in full size. Both
hold the same weights, so the distribution is measured once for both: KL(full ‖ quantized) exactly over the
vocabulary, at the positions of completions that the quantized role drew, and the mean |Δ log p| of their
tokens. Rates are of `g.generate` on a prompt of 8 tokens.

**What limits it.** Packed: unpacking, on one core of a CPU; it saves bytes, and no time in batches.
Embeddings and head keep their precision, which is most of a small model with a large vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.generators import as_a_run
from benchmarks.harness.machine import backend
from benchmarks.harness.measure import peak_bytes, run_once
from benchmarks.harness.record import Figure
from benchmarks.harness.shapes import MODELS, make_module, make_prompts, vocabulary_of
from grpo_fn.policy.quantized_role import MODES, STORAGES, quantized_role
from grpo_fn.trees import Tree, nbytes, on_host
from runners.config.names import EMBEDDED

PROMPT = 8  # tokens


@attrs.frozen
class Size:
    """How much is measured."""

    batches: tuple[int, ...]
    tokens: int  # of a completion at most
    seconds: float  # for one rate; slow combinations draw fewer tokens
    rows: int  # of the sample that the log-probs are compared on
    width: int  # tokens of each


CPU_SIZE = Size((1, 16, 128), 32, 2.0, 16, 32)
GPU_SIZE = Size((1, 16, 128), 64, 1.0, 32, 64)
QUICK_SIZE = Size((1, 4), 4, 0.05, 2, 4)


@attrs.frozen(eq=False)
class Role:
    """What samples: a policy with its parameters."""

    title: str
    policy: g.Policy
    params: Tree

    @property
    def weight_bytes(self) -> int:
        """Of all its weights."""
        return nbytes(self.params, self.policy.frozen)

    def generate(self, prompt: list[int], rows: int, tokens: int) -> g.Rollout:
        """Completions of one prompt, as a run draws them."""
        return g.generate(
            self.policy,
            self.params,
            [prompt],
            g.Sampling(num_generations=rows, max_new_tokens=tokens),
            key=mx.random.key(0),
            decoding=as_a_run(),
        )


def tokens_per_second(role: Role, prompt: list[int], rows: int, size: Size) -> tuple[float, int]:
    """The better of two samples, a short prompt's prefill included, and how many tokens a row they drew."""
    few = max(2, size.tokens // 16)
    run_once(lambda: role.generate(prompt, rows, few))  # traces
    step = run_once(lambda: role.generate(prompt, rows, few)) / few
    tokens = max(few, min(size.tokens, int(size.seconds / step)))
    seconds = min(run_once(lambda: role.generate(prompt, rows, tokens)) for _ in range(2))
    return rows * tokens / seconds, tokens


def rates(model: str, role: Role, prompt: list[int], size: Size) -> list[Figure]:
    """Rates over batch sizes, bytes of the weights, and the peak at the largest batch."""
    figures = []
    tokens = 0
    for rows in size.batches:
        found, tokens = tokens_per_second(role, prompt, rows, size)
        name = f"{model}: {role.title}: tokens/s at batch {rows}"
        figures.append(Figure(name=name, value=found, unit="tokens/s", note=f"{tokens} tokens a row"))
    weights = role.weight_bytes
    beyond = peak_bytes(lambda: role.generate(prompt, size.batches[-1], tokens), warm=False)
    return [
        *figures,
        Figure(name=f"{model}: {role.title}: weights", value=weights / 1e6, unit="MB"),
        Figure(name=f"{model}: {role.title}: peak", value=(weights + beyond) / 1e6, unit="MB"),
    ]


def mismatch(model: str, mode: str, full: Role, role: Role, prompt: list[int], size: Size) -> list[Figure]:
    """KL(full ‖ quantized) a token and mean |Δ log p|, on tokens that the quantized role drew.

    The KL is exact: over the whole vocabulary at each position.
    """
    drawn = role.generate(prompt, size.rows, size.width)
    tokens_bl = mx.concatenate([mx.repeat(mx.array([prompt]), size.rows, axis=0), drawn.tokens_bt], axis=1)
    kl: list[float] = []
    off: list[float] = []
    for row in range(size.rows):  # one at a time: whole distributions are large

        def logp(side: Role, row: int = row) -> mx.array:
            z_tv = side.policy.logits(side.params, tokens_bl[row : row + 1, :-1])[0, len(prompt) - 1 :]
            z_tv = z_tv.astype(mx.float32)
            return z_tv - mx.logsumexp(z_tv, axis=-1, keepdims=True)

        p_tv, q_tv = logp(full), logp(role)
        chosen_t1 = drawn.tokens_bt[row, :, None]
        means_2 = mx.stack(
            [
                (mx.exp(p_tv) * (p_tv - q_tv)).sum(axis=-1).mean(),
                mx.abs(mx.take_along_axis(p_tv - q_tv, chosen_t1, axis=-1)).mean(),
            ]
        )
        for found, mean in zip((kl, off), on_host(means_2), strict=True):
            found.append(mean)
    title = f"{model}: {mode} dequantized"
    return [
        Figure(name=f"{title}: KL", value=sum(kl) / len(kl), unit="nats"),
        Figure(name=f"{title}: mean abs. Δ log p", value=sum(off) / len(off), unit="nats"),
    ]


def measure(model: str, modes: Sequence[str], size: Size) -> list[Figure]:
    """All modes of one model."""
    module = make_module(model)
    policy = g.Policy.from_module(module)
    prompt = make_prompts(1, PROMPT, vocabulary_of(module))[0]
    full = Role("none", policy, policy.params)
    say(f"quant: {model}, none")
    figures = rates(model, full, prompt, size)
    for mode in modes:
        for storage in STORAGES:
            say(f"quant: {model}, {mode}, {storage}")
            try:
                made = quantized_role(policy, mode, storage)
            except ValueError as error:  # a shape that the mode's groups do not divide
                say(f"quant: {model}, {mode} left out: {error}")
                continue
            role = Role(f"{mode} {storage}", made.policy, made.transform(policy.params))
            g.materialize(role.params)
            figures += rates(model, role, prompt, size)
            if storage == "dequantized":
                figures += mismatch(model, mode, full, role, prompt, size)
            del made, role
            mx.clear_cache()
    return figures


def models_here(quick: bool) -> list[str]:
    """The models of a run without --model: on a CPU those that it can decode in minutes."""
    if quick:
        return ["tiny"]
    small = [EMBEDDED, "qwen2-6x256"]
    return small if backend() == "cpu" else ["nanochat-d20", "nanochat-d32", "qwen2.5-0.5b", EMBEDDED]


@benchmark("quant", parts=("models",))
@MODELS
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), help="Only this mode.")
def main(quick: bool, models: Sequence[str], modes: Sequence[str]) -> Sequence[Figure]:
    """Quantized roles of each mode and storage: tokens/s, weight bytes, peak, KL and mean |Δ log p|."""
    size = QUICK_SIZE if quick else CPU_SIZE if backend() == "cpu" else GPU_SIZE
    modes = modes or (["affine-8", "mxfp4"] if quick else list(MODES))
    return [figure for model in models or models_here(quick) for figure in measure(model, modes, size)]


if __name__ == "__main__":
    main()
