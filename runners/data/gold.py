"""Reads reference completions for supervised updates from a data set's rows or a run's
completions.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from grpo_fn.rollout import FindStop
from runners.answers.values import value_text
from runners.config.loading import Config
from runners.data.messages import gold_turn, prompt_fault
from runners.data.prompts import Example, build_examples
from runners.data.rendering import end_of_turn, has_template
from runners.data.row_files import Row, Rows, read_file, skip_row
from runners.errors import UserError
from runners.tokenization.text import encode


@attrs.frozen(eq=False)
class GoldReader:
    """Adds reference completions to examples."""

    config: Config
    tokenizer: Any  # mlx-lm's wrapper
    find_stop: FindStop | None  # finds rollout.stop

    def of_rows(
        self, examples: Sequence[Example], rows: Rows, split: str
    ) -> tuple[list[Example], list[str]]:
        """Reads reference completions from a data set's rows. Returns the examples and messages
        about skipped rows.

        Raises UserError for a row without a reference completion, unless `data.on_bad_row` is
        "skip".
        """
        data = self.config.data
        column = data.completion or data.answer
        texts = [gold_text(rows[example.number].get(column)) for example in examples]
        for example, text in zip(examples, texts, strict=True):
            if not text:
                skip_row(
                    rows[example.number].place,
                    f"no reference completion in {column or 'any column'}",
                    data.on_bad_row,
                )
        return self._with_gold(examples, texts, split)

    def of_file(self) -> tuple[list[Example], list[str]]:
        """Reads reference completions from the file `sft.completions`: each finished completion
        with a reward of at least `sft.min_reward`, without duplicates.

        Raises UserError if the file contains no such completion.
        """
        sft = self.config.sft
        found = dict[str, Row]()
        read = read_file(Path(sft.completions))
        for row in read:
            if row.fault:
                raise UserError(f"{row.place}: {row.fault}")
            reward = row.get("reward")
            good = isinstance(reward, int | float) and reward >= sft.min_reward
            if (
                good
                and row.get("finished", True)
                and not row.get("messages")
                and not row.get("images")
            ):
                context = row.get("context") or []
                turns = context if isinstance(context, list) else [context]
                messages = [*turns, {"role": "user", "content": row.get("prompt")}]
                fault = prompt_fault(messages)
                if fault:
                    raise UserError(f"{row.place}: {fault}")
                values = {"prompt": messages, "completion": row.get("completion")}
                found.setdefault(repr(values), Row(values, row.place))
        if not found:
            raise UserError(
                f"{sft.completions}: none of {len(read)} completions is finished and has a "
                f"reward of at least sft.min_reward = {sft.min_reward:g}"
            )
        rows = Rows(found.values())
        data = attrs.evolve(
            self.config.data, prompt="prompt", system_prompt="", answer="", image=""
        )
        examples, too_long = build_examples(rows, data, self.tokenizer)
        texts = [gold_text(rows[example.number]["completion"]) for example in examples]
        made, notices = self._with_gold(examples, texts, "supervised")
        used = f"supervised data: {len(found)} of {len(read)} completions of {sft.completions}"
        return made, [used, *rows.notices("supervised", too_long, data.max_prompt_length), *notices]

    def _with_gold(
        self, examples: Sequence[Example], texts: Iterable[str | None], split: str
    ) -> tuple[list[Example], list[str]]:
        """Returns the examples whose text is a completion of at most rollout.max_new_tokens
        tokens.
        """
        limit = self.config.rollout.max_new_tokens
        end = self._end()
        both = zip(examples, texts, strict=True)
        made = [
            attrs.evolve(each, gold=self._tokens(each, text, end)) for each, text in both if text
        ]
        kept = [example for example in made if len(example.gold) <= limit]
        if made and not kept:
            raise UserError(
                f"rollout.max_new_tokens is {limit}, but the shortest of {len(made)} reference "
                f"completions of the {split} data has "
                f"{min(len(example.gold) for example in made)} tokens"
            )
        counts = (
            (len(examples) - len(made), "no reference completion"),
            (
                len(made) - len(kept),
                f"reference completions longer than rollout.max_new_tokens = {limit} tokens",
            ),
        )
        return kept, [
            f"{split} data: {count} of {len(examples)} rows left out: {why}"
            for count, why in counts
            if count
        ]

    def _tokens(self, example: Example, text: str, end: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a completion's tokens as the model would sample them: from after the nudge to a
        stop string or an end token.
        """
        text = text if self.config.data.prompt_form == "raw" else text.strip()
        for given in (example.opening, example.opening.strip(), self.config.data.nudge):
            text = text.removeprefix(given)
        whole = encode(self.tokenizer, example.text + text, add_special_tokens=False)
        before = next(
            (n for n in (0, 1) if whole[: len(example.tokens) - n] == example.tokens[n:]), None
        )
        if before is None:  # a token spans prompt and completion, or there are images
            tokens = encode(self.tokenizer, text, add_special_tokens=False)
        else:
            tokens = whole[len(example.tokens) - before :]
        stopped = self.find_stop(tokens, 0) if self.find_stop else None
        return tokens[:stopped] if stopped else (*tokens, *end)

    def _end(self) -> tuple[int, ...]:
        """Returns the token that ends a turn, or an empty tuple if no token ends a completion."""
        ends = sorted(self.tokenizer.eos_token_ids)
        turn: tuple[int, ...] = ()
        if self.config.data.prompt_form != "raw" and has_template(self.tokenizer):
            behind = end_of_turn(self.tokenizer, self.config.data.chat_template_kwargs)
            turn = encode(self.tokenizer, behind, add_special_tokens=False)
        usual: Any = getattr(self.tokenizer, "eos_token_id", None)
        return tuple(token for token in (*turn, usual, *ends) if token in ends)[:1]


def gold_text(value: Any) -> str | None:
    """Extracts the reference completion from a column's value: a text, a number, or the assistant's
    last message.
    """
    if isinstance(value, list | tuple | None):
        return gold_turn(value)
    return None if isinstance(value, Mapping) else value_text(value)
