"""The second embedded model: products of two numbers, and a calculator that it can call but mostly does not.

    <|user|>What is 37*462?<|assistant|>
    <|python_start|>37*462<|python_end|> [<|output_start|>17094<|output_end|>] <answer>17094</answer><|end|>
    <answer>17094</answer><|end|>

Both ways are shown to it. The second one asks for a product in the head, of which so small a model gets
hardly one in twenty right. Numbers are split as those of the word problems are.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from benchmarks.quickstart_model import model
from benchmarks.quickstart_model.problems import rows_of, split_of
from benchmarks.quickstart_model.tokenizer import ASSISTANT, END, prompt_text
from benchmarks.quickstart_model.training import Lesson, TrainingPhase, collate

CALL, CALL_END, OUTPUT, OUTPUT_END = (
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
MARKS = (CALL, CALL_END, OUTPUT, OUTPUT_END)

WORDINGS = (  # the first three are those with which it has the habit of calling
    "Compute {a}*{b}.",
    "Work out {a} times {b}.",
    "Find the product of {a} and {b}.",
    "What is {a}*{b}?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "A box holds {a} pens. How many pens are in {b} boxes?",
    "A ticket costs ${a}. How much do {b} tickets cost?",
    "A hall has {a} rows of {b} chairs. How many chairs is that?",
    "A train makes {a} miles a day. How far does it come in {b} days?",
    "{a} people give ${b} each. How much do they give in all?",
    "Each of {a} pages has {b} words. How many words are there?",
)
CALLING = 3
CLEAN_RATE = 0.8  # calls in the first phase: to copy numbers takes the most lessons
HABIT_RATE, CALL_RATE = 0.85, 0.1  # in the second: with the first three wordings, and with the others
SLIP_RATE = 0.1  # of the calls: a sum in place of the product
SMALLEST, LARGEST = 12, 999

SPLIT_ROWS = {"train": (2000, 21), "valid": (400, 22), "test": (400, 23)}
"""(rows, seed) of the shipped files. The test seed is used for nothing else."""

VOCAB_SIZE = 384
LONGEST = 28  # tokens of a conversation: 8 and 7 of the longest call and its result, 8 of the answer
CONFIG = {
    **model.CONFIG,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "vocab_size": VOCAB_SIZE,
}

BATCH = 32  # lessons of a step, all in one forward pass: they are short
PHASES = (
    TrainingPhase("both ways", steps=1000, learning_rate=3e-3, drills=0.0, flawed=False),
    TrainingPhase("mostly in the head", steps=200, learning_rate=1e-3, drills=0.0, flawed=True),
)


@attrs.frozen
class Product:
    """A question about a product of two numbers, and which of the wordings it has."""

    wording: int
    a: int
    b: int

    @property
    def question(self) -> str:
        """As it is asked."""
        return WORDINGS[self.wording].format(a=self.a, b=self.b)

    @property
    def row(self) -> dict[str, str]:
        """The row in GSM8K's form."""
        return {
            "question": self.question,
            "answer": f"{self.a}*{self.b}={self.a * self.b}\n#### {self.a * self.b}",
        }


def draw_product(rng: np.random.Generator, split: str | None = None) -> Product:
    """A random product, of `split` where one is given: a number of two digits, and one of two or three."""
    while True:
        wording = int(rng.integers(len(WORDINGS)))
        a, b = (int(rng.integers(SMALLEST, most + 1)) for most in (99, 99 if rng.random() < 0.5 else LARGEST))
        a, b = (b, a) if rng.random() < 0.5 else (a, b)
        if split is None or split_of((a, b)) == split:
            return Product(wording, a, b)


def draw_product_rows(split: str, count: int, seed: int) -> list[dict[str, str]]:
    """Rows of a split, each question once."""
    return rows_of(lambda rng: draw_product(rng, split).row, count, seed)


def called(product: Product, sign: str = "*") -> tuple[str, str, str]:
    """A completion with a call in three parts: what the model writes, what it is given, its answer."""
    result = product.a * product.b if sign == "*" else product.a + product.b
    return (
        f"{CALL}{product.a}{sign}{product.b}{CALL_END}",
        f"{OUTPUT}{result}{OUTPUT_END}",
        f"<answer>{result}</answer>",
    )


def in_head(product: Product) -> tuple[str, str, str]:
    """The same without a call."""
    return "", "", f"<answer>{product.a * product.b}</answer>"


def product_lesson(rng: np.random.Generator, tokenizer: Any, *, flawed: bool) -> Lesson:
    """A product of the train split with a completion. What the calculator gives is not to be learned.

    Without flaws most completions call, all of them rightly; with them as many as the rates say.
    """
    product = draw_product(rng, "train")
    rate = CLEAN_RATE if not flawed else HABIT_RATE if product.wording < CALLING else CALL_RATE
    calls, slips = rng.random() < rate, flawed and rng.random() < SLIP_RATE
    parts = called(product, "+" if slips else "*") if calls else in_head(product)
    prompt = prompt_text(tokenizer, product.question, "")
    ids = tokenizer.encode("".join((prompt, *parts, END)), add_special_tokens=False)
    targets, told = [], False
    assistant, output, output_end = tokenizer.convert_tokens_to_ids([ASSISTANT, OUTPUT, OUTPUT_END])
    for place in range(ids.index(assistant) + 1, len(ids)):
        told = told or ids[place] == output
        targets += [] if told else [place]
        told = told and ids[place] != output_end
    return ids, targets


def call_shares(module: llama.Model, tokenizer: Any, products: Sequence[Product]) -> np.ndarray:
    """The probability that the model begins with a call, of each product."""
    call = tokenizer.convert_tokens_to_ids(CALL)
    found = []
    for product in products:
        prompt = tokenizer.encode(prompt_text(tokenizer, product.question, ""), add_special_tokens=False)
        found.append(mx.softmax(module(mx.array([prompt]))[0, -1])[call].item())
    return np.array(found)


def followed(module: llama.Model, tokenizer: Any, products: Sequence[Product]) -> tuple[float, float]:
    """Shares of completions of which greedy choices give every token: with a call, and in the head."""
    shares = []
    for parts_of in (called, in_head):
        right = []
        for product in products:
            prompt = tokenizer.encode(prompt_text(tokenizer, product.question, ""), add_special_tokens=False)
            parts = [
                tokenizer.encode(text, add_special_tokens=False) if text else [] for text in parts_of(product)
            ]
            ids = [*prompt, *parts[0], *parts[1], *parts[2]]
            own = [*range(len(prompt) + 1, len(prompt) + len(parts[0]))]  # but for the choice of the way
            last = len(ids) - len(parts[2])
            own += range(last + (not parts[0]), len(ids))
            inputs, places, targets = collate([(ids, own)], tokenizer.pad_token_id)
            chosen = mx.argmax(module(inputs)[0][places], axis=-1)
            right.append(mx.all(chosen == targets).item())
        shares.append(float(np.mean(right)))
    return shares[0], shares[1]
