"""Defines the teacher of [teacher], which is loaded next to the student and scores the tokens that
the student sampled.
"""

from collections.abc import Callable

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.compile import round_up
from grpo_fn.learner import Teacher, as_teacher_reads, can_share
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.config.names import SELF
from runners.data.prompts import Example
from runners.data.rendering import render
from runners.errors import UserError, show
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.models.folders import resolve_model
from runners.models.loaded_model import LoadedModel
from runners.rewards.experience import Experience
from runners.training.gradients import Computed, MicroBatches


@attrs.frozen(eq=False)
class Grader:
    """A teacher that adds its scores or prompts to a batch before the batch is split."""

    teacher: Teacher
    logprob_step: Callable[[Tree, g.Batch], mx.array]
    config: Config
    tokenizer: object
    share_prompts: bool  # whether a group's prompt can be computed once

    @property
    def in_loss(self) -> bool:
        """Whether the KL is part of the loss, which gives every row a gradient."""
        return self.teacher.kl_coef > 0

    def graded(
        self, batch: g.Batch, experience: Experience, micro_batches: MicroBatches, budget: int
    ) -> Computed[g.Batch]:
        """Returns the batch after setting its advantages and, if there are hints, the teacher's
        prompts.

        The advantages are the weighted task advantages. If the KL is a reward, teacher.weight ·
        (log π_teacher − log μ) is added for each token, where μ is the sampler.
        """
        config = self.config.teacher
        if config.hint:
            batch = self._hinted(batch, experience)
        adv = config.task_weight * batch.advantages_b
        if self.in_loss:
            return Computed(attrs.evolve(batch, advantages_b=adv), (), budget)
        found = self._logprobs(batch, micro_batches, budget)
        adv = adv if adv.ndim == 2 else adv[:, None]
        adv = adv + config.weight * (found.value - batch.rollout_logp_bt)
        batch = attrs.evolve(batch, teacher_logp_bt=found.value, advantages_b=adv)
        return Computed(batch, found.steps, found.micro_batch_tokens)

    def _logprobs(
        self, batch: g.Batch, micro_batches: MicroBatches, budget: int
    ) -> Computed[mx.array]:
        """Computes the teacher's log-probs [B,T] for the batch's tokens. Each rank computes its
        share.
        """
        rows, width = batch.mask_bt.shape
        pieces = g.split_batch(
            attrs.evolve(batch, row_b=mx.arange(rows)),  # rows are reordered in micro-batches
            max_tokens=budget,
            share_prompts=self.share_prompts and not self.config.teacher.hint,
        )
        found = micro_batches.logprobs(self._step, self.teacher.params, pieces, budget)
        logp_bt = np.zeros(
            (rows + 1, width), np.float32
        )  # the last row receives the values for padding rows
        for number, part_bt in found.value.items():
            columns = np.array(part_bt)[:, :width]
            logp_bt[np.array(found.steps[0][number].row_b), : columns.shape[1]] = columns
        return Computed(mx.array(logp_bt[:-1]), found.steps, found.micro_batch_tokens)

    def _step(self, params: Tree, piece: g.Batch) -> mx.array:
        return self.logprob_step(params, as_teacher_reads(piece, self.teacher.policy.vocabulary))

    def _hinted(self, batch: g.Batch, experience: Experience) -> g.Batch:
        prompts = tuple(self.prompt(example) for example in experience.examples)
        adv_pg = mx.zeros((len(prompts), experience.rollout.num_generations))
        other = g.make_batch(attrs.evolve(experience.rollout, prompts=prompts), adv_pg)
        length = other.tokens_bl.shape[1]
        tokens_bm = mx.pad(other.tokens_bl, [(0, 0), (0, round_up(length) - length)])
        return attrs.evolve(
            batch, hinted_tokens_bm=tokens_bm, hinted_lengths_b=other.prompt_lengths_b
        )

    def prompt(self, example: Example) -> tuple[int, ...]:
        """Returns the teacher's prompt: the student's prompt with the hint after the question."""
        data = self.config.data
        *before, last = example.messages
        hint = self.config.teacher.hint.replace("{answer}", example.answer)
        return render(
            self.tokenizer,
            (*before, {**last, "content": f"{last['content']}{hint}"}),
            data.nudge,
            template_kwargs=data.chat_template_kwargs,
            raw=data.prompt_form == "raw",
        )[1]


def make_grader(
    config: Config,
    policy: g.Policy,
    params: Tree,
    loaded: LoadedModel,
    platform: Platform,
    *,
    share_prompts: bool,
    compile: bool,
) -> Grader | None:
    """Creates the teacher that a checked config requests, or returns None. `policy` and `params`
    are the student's initial policy and parameters.

    Raises UserError if the vocabulary differs from the student's, and the errors of
    `load_inference`.
    """
    settings = config.teacher
    if not settings.path:
        return None
    if settings.path == SELF:
        teacher = policy
        weights = policy.cast(params)
    else:
        teacher = _loaded(config, loaded, platform, policy.vocabulary)
        weights = {}
    return Grader(
        Teacher(teacher, weights, settings.weight if settings.form == "loss" else 0.0),
        g.make_logprob_step(teacher, temperature=config.rollout.temperature, compile=compile),
        config,
        loaded.tokenizer,
        share_prompts and can_share(teacher.module),
    )


def _loaded(config: Config, loaded: LoadedModel, platform: Platform, rows: int | None) -> g.Policy:
    """Loads the teacher's policy in the compute dtype. `rows` is the number of rows in the
    student's embedding, or None if unknown.
    """
    folder = resolve_model(config.teacher.path, "teacher.path")
    found = load_inference(
        str(folder),
        platform,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    theirs = found.tokenizer.get_vocab()
    for token, number in loaded.tokenizer.get_vocab().items():
        if theirs.get(token) != number and (rows is None or number < rows):
            raise UserError(
                f"{config.where('teacher.path')}: expected the vocabulary of {loaded.path}, in "
                f"which {show(token)} has the id {number}, found "
                f"{theirs.get(token, 'no such token')} in "
                f"{folder}"
            )
    return found.policy
