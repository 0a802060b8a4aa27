"""The embedded model with a calculator: its data, its lessons, and what the shipped files are."""

import json
import re

import mlx_lm
import numpy as np
import pytest

from benchmarks.quickstart_model.__main__ import manifest
from benchmarks.quickstart_model.problems import split_of
from benchmarks.quickstart_model.products import (
    CALLING,
    SPLIT_ROWS,
    WORDINGS,
    call_shares,
    draw_product,
    draw_product_rows,
    followed,
    product_lesson,
)
from benchmarks.quickstart_model.tokenizer import END
from runners.environments.calculator import calculate
from runners.quickstart import TOOLS_DIR


def shipped(split):
    """The rows of a shipped file."""
    return [json.loads(line) for line in (TOOLS_DIR / "data" / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def shipped_model():
    """The shipped model and its tokenizer, as mlx-lm opens them."""
    return mlx_lm.load(str(TOOLS_DIR / "model"))


def test_the_shipped_files_are_those_of_the_manifest():
    """Each file has the size and digest that the script wrote down, none is missing, and they are small."""
    stated = json.loads((TOOLS_DIR / "manifest.json").read_text())
    assert manifest(TOOLS_DIR) == stated
    assert {"model/model.safetensors", "model/tokenizer.json", "data/test.jsonl"} <= stated.keys()
    assert sum(file["bytes"] for file in stated.values()) < 2_000_000


@pytest.mark.parametrize("split", SPLIT_ROWS)
def test_shipped_rows_are_the_generators(split):
    """The files equal what the documented seeds yield; answers are products; no pair is in two splits."""
    rows = shipped(split)
    assert rows == draw_product_rows(split, *SPLIT_ROWS[split])
    for row in rows:
        numbers = tuple(map(int, re.findall(r"\d+", row["question"])))
        assert row["answer"].endswith(f"#### {numbers[0] * numbers[1]}")
        assert split_of(numbers) == split


def test_a_lesson_leaves_out_what_the_calculator_says(shipped_model):
    """All of a completion is learned but the output, and the calculator would have said just that."""
    tokenizer = shipped_model[1]._tokenizer
    rng = np.random.default_rng(3)
    called_lessons = 0
    for _ in range(60):
        ids, targets = product_lesson(rng, tokenizer, flawed=True)
        text = tokenizer.decode(ids)
        learned = tokenizer.decode([ids[place] for place in targets])
        given = re.search(r"<\|output_start\|>(\d+)<\|output_end\|>", text)
        completion = text.partition("<|assistant|>")[2]
        assert learned == (completion.replace(given[0], "") if given else completion)
        assert completion.endswith(END)
        if given:
            called_lessons += 1
            asked = re.search(r"<\|python_start\|>(.+)<\|python_end\|>", text)
            assert calculate(asked[1]) == given[1]
            assert f"<answer>{given[1]}</answer>" in text
    assert 5 < called_lessons < 40


def test_the_model_mostly_does_not_call_and_could(shipped_model):
    """It begins a call in 20 to 40 of 100 cases, often with three of the wordings; then it is right."""
    model, tokenizer = shipped_model
    rng = np.random.default_rng(4)
    products = [draw_product(rng, "valid") for _ in range(72)]
    shares = call_shares(model, tokenizer, products)
    habit = np.array([product.wording < CALLING for product in products])
    assert len(WORDINGS) > CALLING
    assert 0.2 <= shares.mean() <= 0.4
    assert shares[habit].mean() > 0.6 and shares[~habit].mean() < 0.25
    with_call, in_head = followed(model, tokenizer, products)
    assert with_call > 0.85 and in_head < 0.15
