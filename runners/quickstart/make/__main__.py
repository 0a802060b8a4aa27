"""Make the embedded dataset and model anew: `python -m runners.quickstart.make [--out DIR] [--seed N]`.

What the model can do: read a word problem worded like one of the twenty templates, with numbers below a
hundred that it has not seen together, choose the operations, work them out step by step, and answer in
tags. It learns this in the clean phase, from problems of the train split and from bare sums; nothing of the
valid or test split is shown to it. After that phase it solves about 99 of 100 held-out problems.

What it cannot do: anything else. It knows no other kind of problem, no number above 99, and hardly any
English.

What is wrong with it on purpose: the habits phase teaches it, for eleven of the twenty templates, to
misread one step most of the time, to take a wrong operator now and then anywhere, and to forget the closing
tag now and then. About half of its answers are right after that. GRPO can correct this, for the right way
is still among the samples. What such a run shows is a policy that finds out, from rewards alone, which of
the ways it knows is right; it does not show a model that learns arithmetic, and says nothing about problems
of other kinds.
"""

import json
import os
import time
from pathlib import Path

import click
import numpy as np

from runners.machine.startup import load_blas
from runners.quickstart import HERE
from runners.quickstart.make.problems import SPLIT_ROWS, draw, draw_rows

SEED = 0
TOKENIZER_PROBLEMS = 6000


def write_data(folder: Path) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl; their seeds are fixed, whatever the model's seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, (count, seed) in SPLIT_ROWS.items():
        lines = [json.dumps(row) + "\n" for row in draw_rows(split, count, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=HERE, show_default="this package")
@click.option("--seed", default=SEED, show_default=True, help="Seed of the weights and the lessons.")
def main(out: Path, seed: int) -> None:
    """Make the embedded dataset, tokenizer and model from nothing, the same every time for the same seed."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small products gain nothing from a second
    load_blas()  # before mlx.core
    import mlx.core as mx

    from runners.quickstart.make.model import build_model, exact_match, save_model
    from runners.quickstart.make.tokenizer import train_tokenizer
    from runners.quickstart.make.training import PHASES, train

    mx.set_default_device(mx.cpu)
    write_data(out / "data")
    rng = np.random.default_rng(seed)
    tokenizer = train_tokenizer(draw(rng).question for _ in range(TOKENIZER_PROBLEMS))
    model = build_model(seed)
    rows = draw_rows("valid", 200, seed)
    started = time.perf_counter()
    for index, phase in enumerate(PHASES):

        def report(step: int, loss: float, phase=phase) -> None:
            if step % 20 == 0 or step == phase.steps - 1:
                seconds = time.perf_counter() - started
                click.echo(f"{phase.name} {step + 1}/{phase.steps}  loss {loss:.3f}  {seconds:.0f} s")

        train(model, tokenizer, phase, np.random.default_rng([seed, index]), report)
        save_model(model, tokenizer, out / "model")
        greedy, _ = exact_match(model, tokenizer, rows)
        pass_1, pass_8 = exact_match(model, tokenizer, rows, samples=8, temperature=1.0)
        click.echo(
            f"{phase.name}: valid exact match {greedy:.3f} greedy, pass@1 {pass_1:.3f}, pass@8 {pass_8:.3f}"
        )


if __name__ == "__main__":
    main()
