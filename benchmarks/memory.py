"""How close is the memory that `grpo plan` predicts to the peak of a run?

Two steps of the real loop are compared with the forecast for their config. The models have random weights;
completions run to their full length and every group has a gradient, as the forecast assumes. A real
run needs less if completions end early. [Memory](../memory.md) lists the parts of the forecast.

**What limits it.** The number of arrays that MLX has in flight is measured, not derived, and
depends on the speed of the operations.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import mlx.core as mx
import mlx.nn as nn

from benchmarks.harness.command import benchmark, say
from benchmarks.harness.record import Figure
from benchmarks.harness.shapes import Sizes, empty_module, model_config, write_run
from grpo_fn.trees import named_leaves
from runners.config.loading import load_config
from runners.machine.startup import prepare
from runners.memory.forecast import Forecast, forecast
from runners.memory.plan import data_shape
from runners.memory.sizes import model_sizes
from runners.models.folders import copy_companions
from runners.quickstart import MODEL_DIR
from runners.telemetry.events import Event, Finished, Status, Updated
from runners.telemetry.report import Quiet
from runners.training.train import run_training

WITHIN = 15.0  # per cent
USUAL = (
    *("loss.preset=dapo", "loss.dynamic_sampling=false", "loss.overlong.buffer=0"),
    *("optim.schedule=cosine", "log.jsonl=false", "log.completions=false"),
)
# Random weights earn nothing: so that every group has a gradient, completions are rewarded in turn.
REWARD = "def alternating(completions, **_):\n    return [float(i % 2) for i in range(len(completions))]\n"


@attrs.frozen(kw_only=True)
class Case:
    """One run to be predicted and measured; `model` None: the quickstart, except its rewards."""

    model: Mapping[str, Any] | str | None  # its config, for random weights; a folder or a name on the Hub
    words: int = 0  # of each question, about a token each
    settings: Sequence[str] = ()


def _batch(prompts: int, generations: int, new: int) -> list[str]:
    return [
        f"optim.batch_size={prompts}",
        f"rollout.num_generations={generations}",
        f"rollout.max_new_tokens={new}",
    ]


CASES = {
    # Cut to a length that every batch reaches: a forecast is for completions of full length.
    "quickstart": Case(model=None, settings=["rollout.max_new_tokens=24"]),
    "full, prompts of 400 tokens": Case(
        model=model_config("qwen2", 6, 256, 4096), words=200, settings=_batch(2, 8, 48)
    ),
    "LoRA": Case(
        model=model_config("llama", 6, 256, 4096, tie_word_embeddings=False),
        words=30,
        settings=[*_batch(4, 8, 48), 'model.tune="lora"'],
    ),
    "KL, packed 4-bit rollouts": Case(
        model=model_config("qwen2", 4, 384, 4096),
        words=30,
        settings=[
            *_batch(2, 8, 32),
            "loss.beta=0.04",
            "rollout.quantization=affine-4",
            "rollout.storage=packed",
            "loss.correction=token_truncate",
        ],
    ),
    "checkpointing, four micro-batches": Case(
        model=model_config("qwen2", 8, 256, 4096),
        words=30,
        settings=[*_batch(8, 4, 64), "system.grad_checkpoint=true", "system.micro_batch_tokens=1280"],
    ),
    "32,768 words, short completions": Case(
        model=model_config("qwen2", 3, 256, 32768), words=20, settings=_batch(4, 8, 16)
    ),
    "weights, hardly any tokens": Case(
        model=model_config("llama", 4, 768, 4096), words=4, settings=_batch(1, 2, 4)
    ),
    # Computed in float32, which a CPU is quick at.
    "the same, weights and moments in bfloat16": Case(
        model=model_config("llama", 4, 768, 4096),
        words=4,
        settings=[*_batch(1, 2, 4), "model.master=bfloat16", "optim.moments=bfloat16"],
    ),
    "decoding: 128 rows": Case(
        model=model_config("llama", 4, 128, 4096, num_key_value_heads=4),
        words=10,
        settings=[*_batch(16, 8, 40), "system.micro_batch_tokens=512"],
    ),
}
QUICK = ("quickstart", "LoRA", "32,768 words, short completions")


class PhasePeaks(Quiet):
    """Records the peak of MLX's memory in each activity that the loop reports, and the metrics of updates."""

    def __init__(self) -> None:
        """Starts without records."""
        self.peaks: dict[str, int] = {}
        self.updates: list[Mapping[str, Any]] = []
        self._doing = "start"

    def handle(self, event: Event) -> None:
        """A status ends the previous activity: its peak is recorded, and a new one starts."""
        if isinstance(event, Status):
            self._cut(event.text.split()[0])
        if isinstance(event, Updated):
            self.updates.append(event.metrics)
        if isinstance(event, Finished):
            self._cut("finished")

    def _cut(self, doing: str) -> None:
        mx.synchronize()
        self.peaks[self._doing] = max(self.peaks.get(self._doing, 0), mx.get_peak_memory())
        mx.reset_peak_memory()
        self._doing = doing


@attrs.frozen
class Outcome:
    """A config's predicted and measured peak, in bytes."""

    predicted: Forecast
    measured: int
    peaks: Mapping[str, int]  # of each thing that the loop did
    updates: Sequence[Mapping[str, Any]]  # their metrics

    @property
    def error(self) -> float:
        """The forecast as a percentage of the measurement."""
        return 100 * (self.predicted.peak[1] / self.measured - 1)


def outcome(case: Case, *, steps: int = 2) -> Outcome:
    """Predicts and runs a case, and compares the two."""
    platform = prepare()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        settings = [
            *USUAL[-2:],
            f'reward.functions=["{folder}/reward.py:alternating"]',
            f"run.output_dir={folder}/out",
            f"optim.max_steps={steps}",
        ]
        if case.model is None:
            path = "quickstart"
            settings += ["eval.samples=16", "eval.at_start=false", *case.settings]
        else:
            questions = [f"{'7 ' * case.words}{i % 10}" for i in range(40)]
            model = case.model if isinstance(case.model, str) else write_model(folder, case.model)
            path = str(write_run(folder, model, questions, Sizes(1, 2, 4)))
            settings += [*USUAL, *case.settings]
        config = load_config(path, settings).check()
        prompt = data_shape(config)[0]
        assert prompt is not None
        predicted = forecast(config, platform, 1 << 40, prompt=prompt, sizes=model_sizes(config, platform))
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        report = PhasePeaks()
        run_training(config, report=report)
        mx.clear_cache()
    peaks = {name: peak - before for name, peak in report.peaks.items()}
    return Outcome(predicted, max(peaks.values()), peaks, report.updates)


def write_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """A model of random weights with the embedded model's tokenizer."""
    target = folder / "model"
    target.mkdir()
    mx.random.seed(0)
    module = empty_module(dict(config))
    module.set_dtype(getattr(mx, config.get("torch_dtype", "float32")))
    if "quantization" in config:
        nn.quantize(module, **config["quantization"])
    weights = named_leaves(module.parameters())
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "mlx"})
    copy_companions(MODEL_DIR, target)
    (target / "config.json").write_text(json.dumps(config))
    return target


def figures_of(name: str, found: Outcome, target: float | None) -> list[Figure]:
    """The peak as measured and as predicted, and the error of the forecast."""
    peak, predicted = found.predicted.peak
    parts = found.predicted.phases[peak]._asdict()
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{part} {nbytes / 1e6:.0f}" for part, nbytes in largest)
    return [
        Figure(f"{name}: measured peak", found.measured / 1e6, "MB"),
        Figure(f"{name}: predicted", predicted / 1e6, "MB", note=f"{peak}: {parts}"),
        Figure(f"{name}: error", abs(found.error), "%", at_most=target),
    ]


@benchmark("memory")
@click.option("--case", "names", multiple=True, help="Part of a case's name; may be repeated.")
def main(quick: bool, names: Sequence[str]) -> Sequence[Figure]:
    """Compare the memory that `grpo plan` predicts with the peak of a run's real steps."""
    chosen = QUICK if quick else tuple(CASES)
    if names:
        chosen = tuple(name for name in CASES if any(part in name for part in names))
    figures: list[Figure] = []
    for name in chosen:
        say(f"memory: {name}")
        # How far MLX runs ahead varies by a few per cent: --quick, which only has to work, is not judged.
        figures += figures_of(name, outcome(CASES[name]), None if quick else WITHIN)
    return figures


if __name__ == "__main__":
    main()
