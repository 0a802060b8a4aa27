"""What comes before the work: loading against mlx-lm's own, a model's check, help, a conversion's memory.

Loading is compared with `mlx_lm.load` and a cast to the same dtype, in turn; *added* is the median of the
rounds' differences. *Model check* is what a run adds for a new model, *answer kept* what it adds later. Help
is timed from the command to its end. The peak of converting a nanochat checkpoint of 100 MB is beyond that of
the libraries.

**What limits it.** One pass over the weights that looks for NaN and infinity.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import click
import mlx.core as mx

import grpo_fn as g
from benchmarks.harness.command import benchmark, say
from benchmarks.harness.measure import Timing, interleaved
from benchmarks.harness.record import Figure, ratio_figure, time_figure
from benchmarks.harness.shapes import SHAPES, make_module
from grpo_fn.trees import named_leaves
from runners.cli import COMMANDS
from runners.config.loading import load_config
from runners.config.names import EMBEDDED
from runners.config.sections import ModelConfig
from runners.files.cache_folder import cache_folder
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform, prepare
from runners.models.folders import copy_companions
from runners.models.loaded_model import load_model
from runners.models.model_check import check_model
from runners.quickstart import MODEL_DIR

ADDED, HELP, SIZES = 0.2, 0.3, 3.0  # seconds, seconds, times the checkpoint: the targets
CHECK, CHECK_SHARE = 2.0, 0.05  # seconds; of the time of loading, where the answer is known
ROOT = Path(__file__).resolve().parent.parent
MODELS = (EMBEDDED, "qwen2-6x256", "qwen2.5-0.5b")

# ru_maxrss begins with the peak of the process that started this one; what Linux says of itself does not.
CONVERT = """
import resource, sys
from pathlib import Path
from runners.machine import startup; startup.prepare()
from runners.conversion.convert import convert
from runners.conversion.packing import QuantizationOptions
def peak():
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], Path(sys.argv[3]))
before = peak()
convert(sys.argv[2], Path(sys.argv[4]))
print(peak() - before)
"""


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """A model folder in bfloat16, as models come, with the embedded model's tokenizer."""
    if name == EMBEDDED:
        yield MODEL_DIR
        return
    with tempfile.TemporaryDirectory(prefix="loading-") as place:
        folder = Path(place)
        words = max(SHAPES[name]["vocab_size"], 1024)  # more than the tokenizer has
        weights = named_leaves(make_module(name, dtype=mx.bfloat16, vocab_size=words).parameters())
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        (folder / "config.json").write_text(json.dumps({**SHAPES[name], "vocab_size": words}))
        copy_companions(MODEL_DIR, folder)
        yield folder


def loading(name: str, machine: Platform, repeats: int) -> list[Figure]:
    """Our two ways of loading a model, and mlx-lm's with the cast to the dtype that ours computes in."""
    import mlx_lm

    with folder_of(name) as folder:
        leaves = named_leaves(load_inference(str(folder), machine).module.parameters())
        dtype = next(iter(leaves.values())).dtype

        def theirs(cast: mx.Dtype) -> Callable[[], Any]:
            def call() -> Any:
                module = mlx_lm.load(str(folder))[0]
                module.set_dtype(cast)
                return module.parameters()

            return call

        calls = {
            "ours": lambda: load_inference(str(folder), machine).module.parameters(),
            "mlx-lm": theirs(dtype),
            "training: ours": lambda: load_model(ModelConfig(path=str(folder)), machine).module.parameters(),
            "training: mlx-lm": theirs(mx.float32),
        }
        times = interleaved(calls, repeats=repeats)
    added = {
        "added": added_seconds(times["ours"], times["mlx-lm"]),
        "training: added": added_seconds(times["training: ours"], times["training: mlx-lm"]),
    }
    return [
        *(time_figure(f"{name}: {way}", taken) for way, taken in times.items()),
        *(attrs.evolve(figure, name=f"{name}: {way}") for way, figure in added.items()),
    ]


def checking(name: str, machine: Platform, repeats: int) -> list[Figure]:
    """What the check of a model takes at its first run, and what reading its answer takes at a later one."""
    with folder_of(name) as folder, tempfile.TemporaryDirectory(prefix="loading-") as cache:
        config = load_config("quickstart", [f"model.path={folder}"])
        prompts = [[number % 300 + 1 for number in range(length)] for length in (40, 48)]
        samples: dict[str, list[float]] = {"loaded": [], "checked": [], "answer kept": []}
        with patch.dict(os.environ, GRPO_FN_CACHE=cache):
            for _ in range(repeats):
                started = time.perf_counter()
                loaded = load_model(config.model, machine)
                policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
                mx.eval(policy.params, policy.frozen)
                samples["loaded"].append(time.perf_counter() - started)
                for way in ("checked", "answer kept"):
                    started = time.perf_counter()
                    check_model(
                        config,
                        policy,
                        policy.params,
                        prompts,
                        model_config=loaded.config,
                        platform=machine,
                        share_prompts=True,
                    )
                    samples[way].append(time.perf_counter() - started)
                shutil.rmtree(cache_folder() / "model_checks")
    times = {way: Timing(tuple(taken)) for way, taken in samples.items()}
    most, most_share = (CHECK, None) if name == EMBEDDED else (None, CHECK_SHARE)
    return [
        time_figure(f"{name}: model check", times["checked"], at_most=most),
        time_figure(f"{name}: model check, answer kept", times["answer kept"]),
        ratio_figure(
            f"{name}: model check, answer kept / loading",
            times["answer kept"] / times["loaded"],
            at_most=most_share,
        ),
    ]


def added_seconds(ours: Timing, theirs: Timing) -> Figure:
    """What ours takes beyond theirs: the median of the rounds' differences, at least 0."""
    rounds = sorted(a - b for a, b in zip(ours.samples, theirs.samples, strict=True))
    value = max(statistics.median(rounds), 0.0)
    return Figure(
        name="", value=value, unit="s", low=rounds[0], high=rounds[-1], samples=len(rounds), at_most=ADDED
    )


def answers(commands: Sequence[str], repeats: int) -> list[Figure]:
    """Seconds from starting `grpo … --help` to its end, in a process of its own each time."""
    samples: dict[str, list[float]] = {command: [] for command in commands}
    for turn in range(repeats + 1):  # the first may have to compile the modules
        for command in commands:
            started = time.perf_counter()
            line = [sys.executable, "-m", "runners.cli", *command.split(), "--help"]
            subprocess.run(line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            if turn:
                samples[command].append(time.perf_counter() - started)
    return [
        time_figure(f"grpo {command} --help".replace("  ", " "), Timing(tuple(taken)), at_most=HELP)
        for command, taken in samples.items()
    ]


def write_checkpoint(folder: Path, *, width: int, layers: int) -> int:
    """A nanochat checkpoint of random float32 tensors as PyTorch writes it; bytes of its model_*.pt."""
    import tiktoken
    import torch  # pyright: ignore[reportMissingImports]

    words = 320
    shapes = {"attn.c_q": (1, 1), "attn.c_k": (1, 1), "attn.c_v": (1, 1), "attn.c_proj": (1, 1)}
    shapes |= {"mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
    tensors = {name: torch.randn(words, width) for name in ("transformer.wte.weight", "lm_head.weight")}
    for layer in range(layers):
        for name, (rows, columns) in shapes.items():
            tensors[f"transformer.h.{layer}.{name}.weight"] = torch.randn(rows * width, columns * width)
    folder.mkdir()
    torch.save(tensors, folder / "model_000001.pt")
    sizes = {"sequence_len": 64, "vocab_size": words, "n_layer": layers, "n_embd": width}
    config = {**sizes, "n_head": 4, "n_kv_head": 4}
    (folder / "meta_000001.json").write_text(json.dumps({"model_config": config}))
    bytes_alone = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]", mergeable_ranks=bytes_alone, special_tokens={"<|bos|>": 256}
    )
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    return (folder / "model_000001.pt").stat().st_size


def conversion(layers: int) -> list[Figure]:
    """The memory that a conversion takes at its peak, beyond the libraries' and a small conversion's."""
    with tempfile.TemporaryDirectory(prefix="loading-") as name:
        folder = Path(name)
        write_checkpoint(folder / "small", width=64, layers=1)
        size = write_checkpoint(folder / "large", width=512, layers=layers)
        arguments = [str(folder / place) for place in ("small", "large", "a", "b")]
        done = subprocess.run(
            [sys.executable, "-c", CONVERT, *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        )
    ratio = int(done.stdout) / size
    return [
        Figure(name="conversion: checkpoint", value=size / 1e6, unit="MB"),
        Figure(name="conversion: peak / checkpoint", value=ratio, unit="x", at_most=SIZES),
    ]


@benchmark("loading")
@click.option("--repeats", default=7, show_default=True, help="Rounds.")
def main(quick: bool, repeats: int) -> Sequence[Figure]:
    """Loading a model against mlx-lm's own, its check, `--help` of every command, a conversion's memory."""
    machine = prepare()
    figures: list[Figure] = []
    if find_spec("torch") is None:
        say("loading: no conversion without PyTorch: pip install -e '.[torch]'")
    else:
        say("loading: a conversion")
        figures += conversion(layers=2 if quick else 8)
    say("loading: help")
    figures += answers(["", "run"] if quick else ["", *COMMANDS], 2 if quick else repeats)
    for name in (EMBEDDED, "tiny") if quick else MODELS:
        say(f"loading: {name}")
        figures += loading(name, machine, 2 if quick else repeats)
        figures += checking(name, machine, 1 if quick else 3)
    # --quick has to work on a machine that is busy with the other tests.
    return [attrs.evolve(figure, at_most=None) for figure in figures] if quick else figures


if __name__ == "__main__":
    main()
