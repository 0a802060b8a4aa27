"""Samples and scores completions, for a run's evaluations and for `grpo eval`."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.answers.forms import AnswerForm, fitting_form
from runners.data.prompts import Example, columns_of
from runners.engines.engine import Engine
from runners.environments.environments import Player
from runners.errors import UserError
from runners.images.tower import VisionPart
from runners.inference.text_generation import LENGTH, Batch, sample_batches
from runners.rewards.calls import NO_RUN, TrainerState
from runners.rewards.experience import FinishedEpisode, faults_of
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder

SUCCESS = 1.0  # an episode is a success if the environment's own reward is at least this
_MANY = 0.9  # share of truncated or answerless completions that causes a notice


@attrs.frozen(kw_only=True)
class Completion:
    """One completion. For a conversation, `text` is the model's last turn, and the last five fields
    are set."""

    text: str  # including the words of the chat template and the nudge before it
    answer: str | None  # the answer that the form extracts
    right: bool | None  # None without a reference answer
    rewards: dict[str, float | None]  # each reward's value; None if it returned none
    reward: float | None  # their weighted sum
    tokens: int  # number of sampled tokens
    finish: str  # a constant of `runners.inference.text_generation`
    # whether the environment's reward is high enough or, without one, the answer is right
    success: bool | None = None
    turns: int = 0
    calls: int = 0
    failures: int = 0  # number of failed calls
    seconds: float = 0.0  # duration of the calls
    fault: str = ""  # the environment's fault
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def cut(self) -> bool:
        """Whether the completion reached the length limit."""
        return self.finish == LENGTH


@attrs.frozen(eq=False, kw_only=True)
class Evaluator:
    """Samples completions, extracts their answers and scores them with the run's own rewards."""

    engine: Engine  # samples with the weights that it has loaded
    scorer: Scorer | None  # None without rewards
    form: AnswerForm | None  # None if no answers are extracted
    decoder: TextDecoder
    nudge: str
    rows: int = 0  # completions at a time; 0 means 256
    environments: Player | None = None  # if set, each problem is a conversation
    vision: VisionPart | None = None
    state: TrainerState = NO_RUN  # for rewards that accept it
    problems: dict[str, None] = attrs.field(factory=dict)  # messages about faults so far

    def complete(
        self,
        examples: Sequence[Example],
        sampling: g.Sampling,
        key: mx.array,
        numbered: Sequence[int] | None = None,
    ) -> Iterator[tuple[list[Completion], Batch]]:
        """Yields completions for all examples, batch by batch. The G completions for an example are
        consecutive. `numbered` has the same meaning as in `sample_batches`.

        Raises RewardError if a reward fails and `reward.on_error` is "raise".
        """
        for batch in sample_batches(
            self.engine,
            examples,
            sampling,
            key=key,
            decoder=self.decoder,
            nudge=self.nudge,
            rows=self.rows,
            environments=self.environments,
            vision=self.vision,
            numbered=numbered,
        ):
            yield self._judged(batch, sampling.num_generations), batch

    def _judged(self, batch: Batch, size: int) -> list[Completion]:
        asked = [batch.examples[row // size] for row in range(len(batch.texts))]
        rewards = self.scorer.rewards if self.scorer else ()
        values_kb = self._scored(batch, asked, size)
        weights = np.array([reward.weight for reward in rewards])
        totals_b = np.nansum(values_kb * weights[:, None], axis=0)
        totals_b[np.isnan(values_kb).all(axis=0)] = np.nan
        answers = [self._read(text) for text in batch.texts]
        rights: dict[int, bool] = {}
        if self.form:
            self.problems.update(dict.fromkeys(self.form.doubts(batch.texts)))
            known = [row for row, example in enumerate(asked) if example.answer]
            golds = [asked[row].answer for row in known]
            # If a reward runs all tests, their cached outcomes are reused.
            whole = all(reward.name != "correctness_reward_func" for reward in rewards)
            scores = self.form.scores([answers[row] for row in known], golds, whole=whole)
            rights = {row: score == 1 for row, score in zip(known, scores, strict=True)}
        found = []
        for row, text in enumerate(batch.texts):
            named = zip(rewards, values_kb[:, row], strict=True)
            one = Completion(
                text=text,
                answer=answers[row],
                right=rights.get(row),
                rewards={reward.name: _known(value) for reward, value in named},
                reward=_known(totals_b[row]),
                tokens=batch.lengths[row],
                finish=batch.finish[row],
            )
            found.append(one if batch.played is None else self._as_episode(one, batch.played[row]))
        return found

    def _scored(self, batch: Batch, asked: Sequence[Example], size: int) -> np.ndarray:
        """Returns the rewards' values [K, B]. NaN means no reward."""
        if self.scorer is None:
            return np.zeros((0, len(asked)))
        played = batch.played
        scores = self.scorer.score(
            batch.texts,
            [list(example.messages) for example in asked],
            columns_of(batch.examples, size),
            batch.rollout.completions(),
            self.state,
            conversations=None if played is None else [each.messages for each in played],
            environments=None if played is None else [each.environment for each in played],
            printed=None if played is None else [each.printed for each in played],
        )
        self.problems.update(dict.fromkeys(scores.problems))
        if played is not None:
            scores.values_kb[:, [bool(each.fault) for each in played]] = np.nan
            self.problems.update(dict.fromkeys(faults_of(played)))
        return scores.values_kb

    def _as_episode(self, one: Completion, played: FinishedEpisode) -> Completion:
        """Returns a conversation's completion, with the counts and whether the conversation
        succeeded.
        """
        own = None if self.environments is None else self.environments.reward
        success = None if one.right is None else one.right and not played.fault
        if own is not None and own.name in one.rewards:
            success = (one.rewards[own.name] or 0.0) >= SUCCESS
        return attrs.evolve(
            one,
            success=success,
            turns=played.counts["turns"],
            calls=played.counts["calls"],
            failures=played.counts["failures"],
            seconds=played.seconds,
            fault=played.fault,
            messages=tuple(played.messages),
        )

    def complete_all(
        self, examples: Sequence[Example], sampling: g.Sampling, key: mx.array
    ) -> list[Completion]:
        """Returns the completions from `complete` for all examples, in one list."""
        batches = self.complete(examples, sampling, key)
        return list(chain.from_iterable(found for found, _ in batches))

    def notice(self, found: Sequence[Completion], examples: Sequence[Example], limit: int) -> str:
        """Returns a message if nine in ten completions, one per example, are truncated at `limit`
        tokens or lack the required answer format. The message suggests a length, or the format that
        most completions have. Otherwise, the result is empty.
        """
        form = self.form
        many = _MANY * len(found)
        cut = sum(each.cut for each in found)
        if found and cut >= many:
            ended = [each.tokens for each in found if not each.cut]
            others = f"; finished completions have up to {max(ended)}" if ended else ""
            return (
                f"{cut} of {len(found)} completions are cut off at {limit} tokens{others}: set "
                f"a larger rollout.max_new_tokens, such as {2 * limit}"
            )
        lacking = sum(each.answer is None for each in found)
        if form is None or not found or lacking < many:
            return ""
        line = (
            f"{lacking} of {len(found)} completions lack {form.what}, "
            f'which answer.form = "{form.spec}" reads'
        )
        golds = [example.answer for example in examples]
        fitting = fitting_form([each.text for each in found], golds, form.thoughts)
        if fitting is None:
            return f"{line}; request it with data.system_prompt or data.nudge"
        name, have, right = fitting
        return f'{line}; {have} fit answer.form = "{name}", {right} of them with the right answer'

    def _read(self, text: str) -> str | None:
        try:
            return self.form.read(text) if self.form else None
        except UserError as error:  # raised by the user's function
            self.problems[str(error)] = None
            return None


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
