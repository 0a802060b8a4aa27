"""The shipped data and models, with and without a calculator, have the properties of their generators."""

import itertools
import json
import re

import mlx_lm
import numpy as np
import pytest

from benchmarks.quickstart_model import problems, products
from benchmarks.quickstart_model.__main__ import manifest
from benchmarks.quickstart_model.model import exact_match
from benchmarks.quickstart_model.problems import LARGEST, SPLITS, split_of
from benchmarks.quickstart_model.tokenizer import ASSISTANT, END, SYSTEM, TAGS, USER, prompt_text
from runners.environments.calculator import calculate
from runners.quickstart import DATA_DIR, MODEL_DIR, TOOLS_DIR

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


def shipped(split: str, folder=DATA_DIR) -> list[dict[str, str]]:
    """The rows of a shipped file."""
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def shipped_model():
    """The shipped model and its tokenizer, loaded by mlx-lm."""
    return mlx_lm.load(str(MODEL_DIR))


@pytest.fixture(scope="module")
def calling_model():
    """The same for the model with a calculator."""
    return mlx_lm.load(str(TOOLS_DIR / "model"))


def test_splits_are_disjoint_in_numbers():
    """No set of numbers occurs in two splits."""
    files = {
        split: {tuple(sorted(re.findall(r"\d+", row["question"]))) for row in shipped(split)}
        for split in SPLITS
    }
    assert all(len(numbers) > 300 for numbers in files.values())
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(files.values(), 2))


@pytest.mark.parametrize("split", SPLITS)
def test_shipped_answers_are_what_their_rationale_computes(split):
    """It has two or three true equations with numbers from the question, earlier results, or 2."""
    for row in shipped(split):
        *lines, last = row["answer"].split("\n")
        equations = [EQUATION.findall(line)[0] for line in lines]
        assert 2 <= len(equations) <= 3
        known = {*re.findall(r"\d+", row["question"]), "2"}
        for left, operator, right, result in equations:
            assert eval(f"{left}{operator}{right}=={result}"), row  # a quotient is exact
            assert {left, right} <= known, row
            assert 1 <= int(result) <= LARGEST
            known.add(result)
        assert last == f"#### {equations[-1][3]}"


@pytest.mark.parametrize("split", SPLITS)
def test_shipped_rows_are_the_generators(split):
    """The files equal the output for the documented seeds; no question occurs twice; products are right."""
    rows = shipped(split)
    assert rows == problems.draw_rows(split, *problems.SPLIT_ROWS[split])
    assert len({row["question"] for row in rows}) == len(rows)
    multiplied = shipped(split, TOOLS_DIR / "data")
    assert multiplied == products.draw_product_rows(split, *products.SPLIT_ROWS[split])
    for row in multiplied:
        numbers = tuple(map(int, re.findall(r"\d+", row["question"])))
        assert row["answer"].endswith(f"#### {numbers[0] * numbers[1]}")
        assert split_of(numbers) == split


def test_tokenizer_keeps_tags_whole_and_digits_apart(shipped_model):
    """Each tag and each digit is one token; any text is decoded unchanged."""
    tokenizer = shipped_model[1]
    for text in (*TAGS, *"0123456789", END):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert len(tokenizer.encode("4711", add_special_tokens=False)) == 4
    for text in (shipped("valid")[0]["answer"], "Grüße, 北京 — 1,234.5\n\tx"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template_is_short_and_knows_systems(shipped_model):
    """It has one token per turn, system messages, and the nudge at the end; prompts have under 60 tokens."""
    tokenizer = shipped_model[1]
    turns = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == f"{SYSTEM}Think.{USER}2+2?{ASSISTANT}"
    assert prompt_text(tokenizer, "2+2?") == f"{USER}2+2?{ASSISTANT}<reasoning>"
    questions = [row["question"] for row in shipped("valid")]
    lengths = [len(tokenizer.encode(prompt_text(tokenizer, q), add_special_tokens=False)) for q in questions]
    assert max(lengths) < 60


def test_shipped_model_has_bad_habits_and_knows_better(shipped_model):
    """Greedy answers are right for 30 to 55 % of valid problems; eight samples solve many more."""
    rows = shipped("valid")[:48]
    model, tokenizer = shipped_model
    greedy, _ = exact_match(model, tokenizer, rows)
    _, pass_8 = exact_match(model, tokenizer, rows[:16], samples=8, temperature=1.0)
    assert 0.3 <= greedy <= 0.55
    assert pass_8 >= greedy + 0.2


def test_the_shipped_files_are_small_and_those_of_the_manifest():
    """Size and digest of each file of the second model are those in the manifest."""
    stated = json.loads((TOOLS_DIR / "manifest.json").read_text())
    assert manifest(TOOLS_DIR) == stated
    assert {"model/model.safetensors", "model/tokenizer.json", "data/test.jsonl"} <= stated.keys()
    assert sum(file["bytes"] for file in stated.values()) < 2_000_000
    for folder, most in ((MODEL_DIR, 5_000_000), (DATA_DIR, 1_000_000)):
        assert sum(path.stat().st_size for path in folder.iterdir()) <= most


def test_a_lesson_leaves_out_what_the_calculator_says(calling_model):
    """All of a completion is learned except the calculator's output, which is right."""
    tokenizer = calling_model[1]._tokenizer
    rng = np.random.default_rng(3)
    called_lessons = 0
    for _ in range(60):
        ids, targets = products.product_lesson(rng, tokenizer, flawed=True)
        text = tokenizer.decode(ids)
        learned = tokenizer.decode([ids[place] for place in targets])
        given = re.search(r"<\|output_start\|>(\d+)<\|output_end\|>", text)
        completion = text.partition("<|assistant|>")[2]
        assert learned == (completion.replace(given[0], "") if given else completion)
        assert completion.endswith(END)
        if given:
            called_lessons += 1
            (asked,) = re.findall(r"<\|python_start\|>(.+)<\|python_end\|>", text)
            assert calculate(asked) == given[1]
            assert f"<answer>{given[1]}</answer>" in text
    assert 5 < called_lessons < 40


def test_the_model_mostly_does_not_call_and_could(calling_model):
    """It starts a call in 20 to 40 of 100 cases, often with three of the wordings, and is then right."""
    model, tokenizer = calling_model
    rng = np.random.default_rng(4)
    asked = [products.draw_product(rng, "valid") for _ in range(72)]
    shares = products.call_shares(model, tokenizer, asked)
    habit = np.array([product.wording < products.CALLING for product in asked])
    assert len(products.WORDINGS) > products.CALLING
    assert 0.2 <= shares.mean() <= 0.4
    assert shares[habit].mean() > 0.6 and shares[~habit].mean() < 0.25
    with_call, in_head = products.followed(model, tokenizer, asked)
    assert with_call > 0.85 and in_head < 0.15
