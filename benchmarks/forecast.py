"""The memory that `grpo plan` predicts for Qwen2.5-0.5B-Instruct on GSM8K: the table of docs/gsm8k.md.

Nothing is measured and nothing is fetched: the model's sizes are those of its config.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import click

from benchmarks.harness.places import filled
from benchmarks.harness.shapes import SHAPES
from runners.config.loading import load_config
from runners.errors import UserError
from runners.machine.startup import Platform, prepare
from runners.memory.forecast import forecast
from runners.memory.sizes import model_sizes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gsm8k.md"
MODEL = "qwen2.5-0.5b"
MACS, PCS = (8, 16, 24, 32, 48, 64), (8, 16, 32, 64)
"""Machines that one can buy: 10⁹ bytes of memory."""
WAYS = (
    ("all weights", ()),
    ("all weights, kept in bfloat16", ("model.master=bfloat16", "optim.moments=bfloat16")),
    ("LoRA", ("model.tune=lora",)),
    (
        "LoRA, 16 rows at a time",
        ("model.tune=lora", "rollout.max_batch=16", "system.micro_batch_tokens=1024"),
    ),
)
"""Name, and what is set otherwise than in the preset gsm8k_qwen."""


def usable(backend: str, gigabytes: float) -> float:
    """What a run may use of a machine's memory.

    macOS leaves the GPU two thirds, of large Macs three quarters; on Linux an eighth is left to the system.
    """
    if backend == "cpu":
        return gigabytes * 7 / 8
    return gigabytes * (2 / 3 if gigabytes <= 36 else 3 / 4)


def peak(backend: str, overrides: Sequence[str]) -> float:
    """The predicted peak of the preset gsm8k_qwen with these overrides, in 10⁹ bytes, for full lengths."""
    config = load_config("gsm8k_qwen", overrides).check()
    platform = Platform(backend)
    sizes = model_sizes(config, platform, stated=SHAPES[MODEL])
    # What this machine's backend does is not what the other one does.
    sizes = attrs.evolve(sizes, shares_prefix=backend == "cpu")
    prompt = config.data.max_prompt_length
    return forecast(config, platform, 1 << 50, prompt=prompt, sizes=sizes).peak[1] / 1e9


def table() -> str:
    """The Markdown table: a row for each way to train."""
    lines = [
        "| what trains | settings | Apple silicon | from | Linux CPU | from |",
        "|---|---|---|---|---|---|",
    ]
    for name, overrides in WAYS:
        settings = ", ".join(f"`{override}`" for override in overrides) or "–"
        cells = []
        for backend, machines in (("metal", MACS), ("cpu", PCS)):
            needed = peak(backend, overrides)
            smallest = next((each for each in machines if usable(backend, each) >= needed), None)
            cells += [f"{needed:.1f} GB", f"a machine of {smallest} GB" if smallest else "–"]
        lines.append(f"| {name} | {settings} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The page with the table in its place; UserError where the place is missing."""
    return filled(PAGE.name, text, {"forecast": table()})


@click.command("forecast")
@click.option("--write", is_flag=True, help="Put the table into docs/gsm8k.md.")
def main(write: bool) -> None:
    """Predict the memory of Qwen2.5-0.5B-Instruct on GSM8K, as `grpo plan` does."""
    prepare()
    if not write:
        click.echo(table())
        return
    try:
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    except UserError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
