"""Make the embedded datasets and models: `python -m benchmarks.quickstart_model [--only NAME] [--out DIR]`.

Word problems (`--only embedded`)

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

Products with a calculator (`--only embedded-tools`)

What the model can do: read a question about a product of two numbers in one of twelve wordings, write the
product as a call of a calculator, and copy the result into its answer. It can also answer at once, in its
head; it was shown both ways. It is far too small for such products: at once it is hardly ever right.

What is wrong with it on purpose: the second phase teaches it to call often with three of the wordings and
seldom with the nine others, and to take a sum for the product in one call of ten. What a run shows is a
policy that finds out, from rewards alone, that the calculator is worth calling with every wording. It knows
the form of the call before.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from runners.machine.startup import load_blas
from runners.quickstart import HERE

SEED = 0
TOKENIZER_PROBLEMS = 6000


def write_data(
    folder: Path,
    splits: dict[str, tuple[int, int]],
    draw_rows: Callable[[str, int, int], list[dict[str, str]]],
) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl; their seeds are fixed, whatever the model's seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, (count, seed) in splits.items():
        lines = [json.dumps(row) + "\n" for row in draw_rows(split, count, seed)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file of a model and its data, by its path in the folder."""
    files = sorted(path for part in ("data", "model") for path in (folder / part).iterdir())
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }


def _progress(name: str, steps: int) -> Callable[[int, float], None]:
    started = time.perf_counter()

    def report(step: int, loss: float) -> None:
        if step % 20 == 0 or step == steps - 1:
            click.echo(f"{name} {step + 1}/{steps}  loss {loss:.3f}  {time.perf_counter() - started:.0f} s")

    return report


def make_word_problems(out: Path, seed: int) -> None:
    """The word problems and the model that knows them."""
    from benchmarks.quickstart_model.model import build_model, exact_match, save_embedded_model
    from benchmarks.quickstart_model.problems import SPLIT_ROWS, draw, draw_rows
    from benchmarks.quickstart_model.tokenizer import train_tokenizer
    from benchmarks.quickstart_model.training import PHASES, train, word_problem

    write_data(out / "data", SPLIT_ROWS, draw_rows)
    rng = np.random.default_rng(seed)
    tokenizer: Any = train_tokenizer(draw(rng).question for _ in range(TOKENIZER_PROBLEMS))
    model = build_model(seed)
    rows = draw_rows("valid", 200, seed)
    for index, phase in enumerate(PHASES):
        lessons = np.random.default_rng([seed, index])

        def next_lesson(lessons=lessons, phase=phase):
            return word_problem(lessons, tokenizer, phase)

        train(model, phase, next_lesson, tokenizer.pad_token_id, _progress(phase.name, phase.steps))
        save_embedded_model(model, tokenizer, out / "model")
        greedy, _ = exact_match(model, tokenizer, rows)
        pass_1, pass_8 = exact_match(model, tokenizer, rows, samples=8, temperature=1.0)
        click.echo(
            f"{phase.name}: valid exact match {greedy:.3f} greedy, pass@1 {pass_1:.3f}, pass@8 {pass_8:.3f}"
        )


def make_products(out: Path, seed: int) -> None:
    """The products and the model with the calculator, with a manifest of all files."""
    from benchmarks.quickstart_model import products
    from benchmarks.quickstart_model.model import build_model, save_embedded_model
    from benchmarks.quickstart_model.tokenizer import train_tokenizer
    from benchmarks.quickstart_model.training import train

    write_data(out / "data", products.SPLIT_ROWS, products.draw_product_rows)
    rng = np.random.default_rng(seed)
    texts = (products.draw_product(rng, "train").question for _ in range(TOKENIZER_PROBLEMS))
    tokenizer: Any = train_tokenizer(texts, products.VOCAB_SIZE, products.MARKS)
    model = build_model(seed, products.CONFIG)
    rng = np.random.default_rng(seed)
    held_out = [products.draw_product(rng, "valid") for _ in range(200)]
    for index, phase in enumerate(products.PHASES):
        lessons = np.random.default_rng([seed, index])

        def next_lesson(lessons=lessons, phase=phase):
            return products.product_lesson(lessons, tokenizer, flawed=phase.flawed)

        report = _progress(phase.name, phase.steps)
        batch = products.BATCH
        train(model, phase, next_lesson, tokenizer.pad_token_id, report, batch, batch)
        save_embedded_model(model, tokenizer, out / "model", products.CONFIG, products.LONGEST)
        shares = products.call_shares(model, tokenizer, held_out)
        with_call, in_head = products.followed(model, tokenizer, held_out)
        click.echo(
            f"{phase.name}: calls {shares.mean():.3f} of the time; answers {with_call:.3f} rightly where it "
            f"calls rightly, {in_head:.3f} in its head"
        )
    (out / "manifest.json").write_text(json.dumps(manifest(out), indent=2) + "\n")


MAKERS: dict[str, tuple[Callable[[Path, int], None], str]] = {
    "embedded": (make_word_problems, ""),
    "embedded-tools": (make_products, "tools"),
}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=HERE, show_default="this package")
@click.option("--only", type=click.Choice(list(MAKERS)), help="Make this one alone.")
@click.option("--seed", default=SEED, show_default=True, help="Seed of the weights and the lessons.")
def main(out: Path, only: str | None, seed: int) -> None:
    """Make the embedded datasets, tokenizers and models from nothing: the same seed, the same models."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small products gain nothing from a second
    load_blas()  # before mlx.core
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    for name, (make, folder) in MAKERS.items():
        if only in (None, name):
            make(out / folder, seed)


if __name__ == "__main__":
    main()
