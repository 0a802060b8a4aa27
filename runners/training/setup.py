"""Builds all parts of a run before its first step, starting with the parts that can fail
quickly.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from grpo_fn.policy import bound_positions
from runners.agents.agents import build_player
from runners.checkpoints.resume import decisions
from runners.config.loading import Config
from runners.config.names import REWARD_NAMES
from runners.data.curriculum import Estimates, with_difficulty
from runners.data.datasets import load_rows, with_answers_of
from runners.data.gold import GoldReader
from runners.data.prompts import Example, build_examples, reward_columns
from runners.data.rendering import template_notices, use_template
from runners.data.stream import PromptOrder, RunLength, drawn
from runners.engines.engine import Advance
from runners.engines.settings import sampling_of, usual_launch
from runners.environments.environments import (
    Player,
    all_rewards,
    load_code,
    start_worker,
)
from runners.errors import UserError, show
from runners.evaluation.evaluation import held_out
from runners.inference.inference_model import check_prompts
from runners.machine.programs.cpu_header import compile_header
from runners.machine.startup import Platform
from runners.memory.forecast import Phase
from runners.memory.plan import memory_outlook, sizes_if_it_can_fit
from runners.models.loaded_model import LoadedModel, load_model
from runners.models.model_reader import vocabulary_rows
from runners.ranks.ranks import Ranks
from runners.rewards.scoring import Scorer, check_columns
from runners.tokenization.text import TextDecoder
from runners.training.learner import Learner, build_learner
from runners.training.rollout import Collector
from runners.user_code.worker import Worker

Say = Callable[[str], None]


@attrs.frozen(eq=False)
class Data:
    """A run's training and held-out examples."""

    train: list[Example]
    evaluation: list[Example]
    gold: list[Example]  # with reference completions, for supervised updates; may be empty
    gold_evaluation: list[Example]  # held-out examples with reference completions
    # messages about skipped rows and prompts, and about a missing chat template
    notices: tuple[str, ...]


@attrs.frozen(eq=False)
class Run:
    """A run that is ready to start."""

    config: Config  # checked; its [loss] is complete
    folder: Path  # OUTPUT_DIR/NAME
    loaded: LoadedModel
    data: Data
    length: RunLength
    order: PromptOrder  # for the training examples
    # initial estimates for the training prompts; None: there is no curriculum
    curriculum: Estimates | None
    learner: Learner
    collector: Collector
    notices: tuple[str, ...]
    ranks: Ranks  # the run's ranks
    phases: Mapping[str, Phase]  # memory forecast by phase; empty: no forecast


@attrs.define(eq=False)
class SetUp:
    """Builds a run from its config.

    Rewards are loaded first, data second and the model last, so that a misspelled name fails
    quickly.
    """

    config: Config  # checked; `build` resolves the values that it leaves open
    platform: Platform
    say: Say = lambda text: None  # shows the current activity
    # keys of [rollout] as resolved by an earlier process
    decided: Mapping[str, Any] | None = None
    ranks: Ranks = attrs.field(factory=Ranks, kw_only=True)  # the run's ranks
    # from `start_worker`; None: a new one
    worker: Worker | None = attrs.field(default=None, kw_only=True)
    start: datetime = attrs.field(factory=datetime.now, kw_only=True)  # of the run's first process
    advance: Advance | None = attrs.field(default=None, kw_only=True)
    note: Say = attrs.field(
        default=lambda line: None, kw_only=True
    )  # receives messages of the engine

    def build(self) -> Run:
        """Builds everything that `train` needs. Raises UserError or ConfigError with a one-line
        message for any fault.
        """
        config, platform, ranks = self.config, self.platform, self.ranks
        worker = self.worker or start_worker(config)
        _check_ranks(config, ranks)
        rewards = load_code(config, worker)
        self.say("reading the data")
        train_rows, held_out_rows = load_rows(config.data, config.folders)
        config = self.config = with_answers_of(config, train_rows, held_out_rows)
        # Without reference answers, only custom rewards can be measured.
        if config.sft.only and not config.data.answer:
            rewards = [reward for reward in rewards if reward.name not in REWARD_NAMES]
        columns = reward_columns((*train_rows, *held_out_rows), config.data.answer)
        check_columns(rewards, columns, environments=config.env.answers and not config.env.agents)
        sizes = sizes_if_it_can_fit(config, platform, ranks.count - config.ranks.samplers)
        loaded = self._loaded()
        loaded.tokenizer.start = self.start
        decoder = TextDecoder(loaded.tokenizer)
        environments = build_player(config, loaded.tokenizer, decoder, loaded.eos_ids, worker)
        if environments is not None:
            environments.check_columns(columns)
        if rewards or not config.sft.only:
            rewards = all_rewards(rewards, environments)
        turn_reward = environments and environments.turn_reward
        if turn_reward and config.reward.aggregate != "sum_then_normalize":
            raise UserError(
                f'{config.where("reward.aggregate")}: expected "sum_then_normalize" with '
                f"get_turn_rewards, found {show(config.reward.aggregate)}"
            )
        reader = None
        if config.sft.is_on:
            find_stop = decoder.find_stop(config.rollout.stop)
            reader = GoldReader(config, loaded.tokenizer, find_stop)
        data = self._examples((train_rows, held_out_rows), columns, loaded, environments, reader)
        train, curriculum, left_out = with_difficulty(data.train, config.data)
        data = attrs.evolve(data, train=train, notices=(*data.notices, *left_out))
        longest = max(map(len, tokens_of((*data.train, *data.gold))))
        config, expected, phases = memory_outlook(
            config, platform, sizes, longest, len(data.evaluation)
        )
        if config.rollout.launch == "auto":
            config = config.having("rollout", launch=usual_launch(platform))
        # Rank 0 decides values that depend on a measurement; all ranks split a batch in the same way.
        proposed = [self.decided or decisions(config), config.system.micro_batch_tokens]
        agreed = ranks.all_gather_object("the decisions", proposed)
        decided = agreed[0][0]
        config = config.having("rollout", launch=decided["launch"], max_batch=decided["max_batch"])
        config = config.having("system", micro_batch_tokens=min(tokens for _, tokens in agreed))
        length = RunLength.of(config, len(data.train), len(data.gold))
        rates_n = curriculum.first_n if curriculum and config.data.curriculum == "static" else None
        order = PromptOrder(data.train, config.run.seed, rates_n)
        learner = build_learner(
            config,
            loaded,
            length,
            platform,
            prompts=tokens_of(drawn(order, 0, config.optim.batch_size).examples),
            decoder=decoder,
            say=self.say,
            advance=self.advance,
            note=self.note,
        )
        if learner.grader is not None:
            check_prompts(
                config.where("teacher.path"),
                tokens_of((*data.train, *data.gold)),
                config.rollout.max_new_tokens,
                None,
                learner.grader.teacher.policy.positions,
            )
        sampling = learner.sampling if learner.quantized is None else learner.quantized.policy
        if loaded.vision is not None and not sampling.shares_prefix:
            raise UserError(
                f"{loaded.path}: completions of prompts with images share one copy of their "
                f"prompt when decoded, which changes this model's numbers on this machine"
            )
        return Run(
            config=config,
            folder=Path(config.run.output_dir) / config.run.name,
            loaded=loaded,
            data=data,
            length=length,
            order=order,
            curriculum=curriculum,
            learner=learner,
            collector=Collector(
                sampling_of(config, loaded.eos_ids),
                Scorer(
                    rewards, config.reward.timeout, config.reward.on_error, config.data.thoughts
                ),
                decoder,
                config,
                order,
                ranks,
                environments,
                loaded.vision,
            ),
            notices=(
                *data.notices,
                *loaded.notices,
                *learner.notices,
                *_setting_warnings(config, learner),
                *expected,
            ),
            ranks=ranks,
            phases=phases,
        )

    def _loaded(self) -> LoadedModel:
        """Loads the model, while programs that every run needs are being compiled."""
        config, platform = self.config, self.platform
        compile_header(platform)
        self.say(f"loading the model {config.model.path}")
        loaded = load_model(
            config.model,
            platform,
            seed=config.run.seed,
            folders=config.folders,
            images=bool(config.data.image),
            image_max_pixels=config.data.image_max_pixels,
        )
        if platform.programs and platform.programs.names:
            self.say("compiling GPU programs")
            platform.programs.wait()
        template = use_template(loaded.tokenizer, config.data.chat_template)
        return attrs.evolve(loaded, chat_template=template)

    def _examples(
        self,
        rows: tuple,
        columns: Mapping[str, str],
        loaded: LoadedModel,
        environments: Player | None,
        reader: GoldReader | None,
    ) -> Data:
        config = self.config
        notices = []
        built = []
        gold = {"train": list[Example](), "eval": list[Example]()}
        check = partial(
            check_prompts,
            vocabulary=vocabulary_rows(loaded.module, loaded.config) or None,
            positions=bound_positions(loaded.module),
        )
        limit = config.rollout.max_new_tokens
        limits = (limit, config.eval.max_new_tokens or limit)
        schemas = environments.schemas if environments else ()
        processor = loaded.vision.processor if loaded.vision else None
        for name, part, most in zip(gold, rows, limits, strict=True):
            examples, too_long = build_examples(
                part, config.data, loaded.tokenizer, schemas, processor, columns
            )
            check(f"{name} data, {loaded.path}", tokens_of(examples), most)
            built.append(examples)
            notices += part.notices(name, too_long, config.data.max_prompt_length)
            if reader and (name == "train" or config.data.completion or not config.sft.completions):
                from_file = name == "train" and bool(config.sft.completions)
                gold[name], lines = (
                    reader.of_file() if from_file else reader.of_rows(examples, part, name)
                )
                check(
                    f"reference completions of the {name} data with their prompts, {loaded.path}",
                    [example.tokens + example.gold for example in gold[name]],
                    0,
                )
                notices += lines
        notices += template_notices(loaded.tokenizer, config.data, config.rollout.stop)
        samples = config.eval.samples
        return Data(
            built[0],
            held_out(built[1], samples),
            gold["train"],
            held_out(gold["eval"], samples),
            tuple(notices),
        )


def tokens_of(examples: Iterable[Example]) -> list[tuple[int, ...]]:
    """Returns the tokens of each example's prompt."""
    return [example.tokens for example in examples]


def _check_ranks(config: Config, ranks: Ranks) -> None:
    """Raises UserError for a setting that is not supported with this number of ranks."""
    others = ranks.count - 1
    samplers = config.ranks.samplers
    staleness = config.rollout.max_staleness
    for key, is_supported, rule in (
        (
            "data.image",
            ranks.is_alone or not config.data.image,
            f"training on prompts with images is only possible on one rank, found {ranks.count}",
        ),
        (
            "ranks.samplers",
            samplers in (0, others),
            f"expected 0, or all ranks but one ({others} of {ranks.count}), found {samplers}",
        ),
        (
            "rollout.max_staleness",
            ranks.is_alone or samplers or not staleness,
            f"expected 0 on several ranks, or ranks.samplers = {others}, found {staleness}",
        ),
    ):
        if not is_supported:
            raise UserError(f"{config.where(key)}: {rule}")


def _setting_warnings(config: Config, learner: Learner) -> list[str]:
    """Returns warnings about settings that are allowed but probably mistakes."""
    rollout = config.rollout
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    if learner.spec.correction != "none" or not (truncated or learner.quantized):
        return []
    cause = "truncated sampling" if truncated else f"rollout.quantization = {rollout.quantization}"
    return [
        f"{cause} samples from a distribution that differs from the learner's; watch "
        "sampling/sampling_logp_"
        'difference, or set loss.correction = "token_truncate"'
    ]
