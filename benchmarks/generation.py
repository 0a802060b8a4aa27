"""Batches as `grpo generate` makes them, against mlx-lm's `batch_generate` on the same prompts.

32 questions in one batch, up to 64 new tokens, greedy and at temperature 1, decoded to text: the embedded
model, which ends its answers, and one with random weights, which hardly does. Ratios are of the time per
token.

**What limits it.** Each step's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import click
import mlx.core as mx
from mlx_lm import batch_generate
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import make_sampler

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.generators import as_a_run
from benchmarks.harness.measure import interleaved
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from runners.config.sections import DataConfig
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples
from runners.engines.engine import Weights
from runners.engines.local import LocalEngine
from runners.inference.inference_model import InferenceModel, load_inference
from runners.inference.text_generation import generation_key, sample_batches
from runners.machine.startup import prepare
from runners.tokenization.text import TextDecoder

PROMPTS = 32
_WIDE = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}


def wide_model(like: InferenceModel, dtype: mx.Dtype) -> InferenceModel:
    """Six layers of width 256 with random weights, and the tokenizer of another model."""
    rows = len(like.tokenizer)
    shape = {
        "model_type": "llama",
        "intermediate_size": 1024,
        "rms_norm_eps": 1e-5,
        "vocab_size": rows,
        **_WIDE,
    }
    mx.random.seed(0)
    module = Model(ModelArgs.from_dict(shape))
    module.set_dtype(dtype)
    module.freeze()
    policy = g.Policy.for_inference(module)
    engine = LocalEngine(like.decoder, as_a_run())
    engine.load(Weights(policy, {}, 0))
    return attrs.evolve(like, module=module, policy=policy, engine=engine)


def compare(name: str, model: InferenceModel, sampling: g.Sampling, repeats: int) -> list[Figure]:
    """Both ways on 32 questions of the embedded data: seconds, tokens a second, how alike the texts are."""
    rows, _ = load_rows(DataConfig(source="embedded", max_samples=PROMPTS))
    examples, _ = build_examples(rows, DataConfig(source="embedded"), model.tokenizer)
    prompts = [list(example.tokens) for example in examples]
    decoder = TextDecoder(model.tokenizer)
    counts: dict[str, int] = {}
    texts: dict[str, list[str]] = {}

    def ours() -> list[mx.array]:
        (done,) = sample_batches(model.engine, examples, sampling, key=generation_key(0), decoder=decoder)
        counts["ours"], texts["ours"] = sum(done.lengths), done.texts
        return []

    def theirs() -> list[mx.array]:
        mx.random.seed(0)
        done = batch_generate(
            model.module,
            model.tokenizer,
            prompts,
            max_tokens=sampling.max_new_tokens,
            sampler=make_sampler(sampling.temperature),
            return_token_ids=True,
        )
        assert done.token_ids is not None
        # An end token is left out there: one for each completion below the limit.
        counts["mlx-lm"] = sum(len(row) + (len(row) < sampling.max_new_tokens) for row in done.token_ids)
        texts["mlx-lm"] = [decoder.decode(row) for row in done.token_ids]
        return []

    calls: dict[str, Callable[[], list[mx.array]]] = {"ours": ours, "mlx-lm": theirs}
    times = interleaved(calls, repeats=repeats)
    alike = sum(a == b for a, b in zip(texts["ours"], texts["mlx-lm"], strict=True)) / len(prompts)
    figures = [
        *(time_figure(f"{name}: {way}", times[way]) for way in calls),
        *(
            Figure(name=f"{name}: {way}, rate", value=counts[way] / times[way].median, unit="tokens/s")
            for way in calls
        ),
    ]
    if sampling.temperature == 0:
        note = "rounding decides between near equals"
        figures.append(Figure(name=f"{name}: same texts", value=100 * alike, unit="%", note=note))
    # Sampled texts differ in length, so what is compared is the time of a token.
    ratio = ratio_figure(f"{name}: ours / mlx-lm", times["ours"] / times["mlx-lm"])
    share = counts["mlx-lm"] / counts["ours"]
    scaled = {
        key: None if value is None else value * share
        for key, value in (
            ("value", ratio.value),
            ("paired", ratio.paired),
            ("low", ratio.low),
            ("high", ratio.high),
        )
    }
    return [*figures, attrs.evolve(ratio, name=f"{ratio.name}, a token", at_most=1.0, **scaled)]


@benchmark("generation")
@click.option("--repeats", default=7, show_default=True, help="Rounds.")
def main(quick: bool, repeats: int) -> Sequence[Figure]:
    """32 prompts in one batch, greedy and sampled: our batches against mlx-lm's batch_generate."""
    machine = prepare()
    embedded = load_inference("embedded", machine)
    wide = wide_model(embedded, mx.float32 if machine.backend == "cpu" else mx.bfloat16)
    limit, repeats = (8, min(repeats, 2)) if quick else (64, repeats)
    figures = []
    for name, model in (("embedded", embedded), ("6 × 256", wide)):
        for temperature in (0.0, 1.0):
            label = f"{name}, {'sampled' if temperature else 'greedy'}"
            say(f"generation: {label}")
            sampling = g.Sampling(temperature=temperature, max_new_tokens=limit, eos_ids=model.eos_ids)
            figures += compare(label, model, sampling, repeats)
    # A machine's jitter decides over the few milliseconds of --quick.
    return [attrs.evolve(figure, at_most=None) for figure in figures] if quick else figures


if __name__ == "__main__":
    main()
