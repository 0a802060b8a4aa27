"""What a run needs before its first step, built in the order in which it can fail most cheaply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.checkpointing import checkpoint_layers
from grpo_fn.decode import FindStop
from grpo_fn.precision import quantized_role
from grpo_fn.sharing import can_share
from grpo_fn.trees import Tree
from runners.config import Config
from runners.data import load_rows
from runners.errors import UserError
from runners.evaluate import held_out
from runners.models import LoadedModel, load_model
from runners.platform import Platform
from runners.prompts import Example, build_examples, reward_columns
from runners.reward_functions import Reward, check_columns, resolve_rewards
from runners.rollout import Collector
from runners.scoring import Scorer
from runners.stream import Plan, PromptStream
from runners.tokenizers import TextDecoder

Say = Callable[[str], None]


@attrs.frozen(eq=False)
class Data:
    """The examples of a run."""

    train: list[Example]
    evaluation: list[Example]
    notices: tuple[str, ...]  # rows and prompts that were left out


@attrs.frozen(eq=False)
class Learner:
    """The functional core of a run: its policies, its steps, and the state before the first of them."""

    policy: g.Policy
    rollout_policy: g.Policy
    quantizer: Callable[[Tree], Tree] | None  # learner params -> rollout params; None: the same
    spec: g.LossSpec
    grad_step: g.GradStep
    update_step: Callable[[g.TrainState], tuple[g.TrainState, g.UpdateStats]]
    logprob_step: Callable[[Tree, g.Batch], mx.array]
    state: g.TrainState
    share_prompts: bool  # whether a group's prompt is computed once


@attrs.frozen(eq=False)
class Run:
    """A run ready to start."""

    config: Config  # checked: [loss] complete
    folder: Path  # OUTPUT_DIR/NAME
    loaded: LoadedModel
    data: Data
    plan: Plan
    stream: PromptStream
    learner: Learner
    collector: Collector
    decoder: TextDecoder
    find_stop: FindStop | None
    notices: tuple[str, ...]


def build_run(config: Config, platform: Platform, say: Say = lambda text: None) -> Run:
    """Everything that `train` needs.

    Rewards, then data, then the model: a misspelt name costs no waiting. `say` is told what goes on.

    Raises UserError or ConfigError, in one line, for whatever is wrong.
    """
    config = config.check()
    spec = config.loss_spec()
    rewards = resolve_rewards(config.reward.functions, config.reward.weights, _reward_dirs(config))
    say("reading the data")
    rows = load_rows(config.data)
    check_columns(rewards, reward_columns(rows[0]))
    say(f"loading the model {config.model.path}")
    loaded = load_model(config.model, platform, seed=config.run.seed)
    data = _examples(config, rows, loaded)
    decoder = TextDecoder(loaded.tokenizer)
    find_stop = decoder.find_stop(config.rollout.stop)
    plan = Plan.of(config, len(data.train))
    learner = build_learner(config, spec, loaded, plan, platform)
    return Run(
        config=config,
        folder=Path(config.run.output_dir) / config.run.name,
        loaded=loaded,
        data=data,
        plan=plan,
        stream=PromptStream(data.train, config.run.seed),
        learner=learner,
        collector=_collector(config, learner, rewards, decoder, find_stop, loaded, platform),
        decoder=decoder,
        find_stop=find_stop,
        notices=(*data.notices, *loaded.notices, *_warnings(config, learner)),
    )


def build_learner(
    config: Config, spec: g.LossSpec, loaded: LoadedModel, plan: Plan, platform: Platform
) -> Learner:
    """Policies, steps and the first state; the loaded module is emptied of its trainable weights."""
    share_prompts = _shares_prompts(config, loaded, platform)
    if config.system.grad_checkpoint:
        checkpoint_layers(loaded.module)
    policy = g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    params = policy.params
    rollout_policy, quantizer = policy, None
    if config.rollout.quantization != "none":
        try:
            role = quantized_role(policy, config.rollout.quantization, config.rollout.storage)
        except ValueError as error:
            raise UserError(f"{config.where('rollout.quantization')}: {error}") from error
        rollout_policy, quantizer = role.policy, role.transform
    policy = policy.skeleton()
    if quantizer is None:
        rollout_policy = policy

    optim = config.optim
    schedule = g.warmup_schedule(optim.schedule, optim.learning_rate, plan.updates, optim.warmup_ratio)
    optimizer = g.adamw(schedule, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay)
    state = g.init_state(
        params,
        optimizer,
        key=mx.random.key(config.run.seed),
        ref_params=params if spec.beta > 0 else None,
    )
    compile_steps = config.system.compile
    temperature = config.rollout.temperature
    return Learner(
        policy=policy,
        rollout_policy=rollout_policy,
        quantizer=quantizer,
        spec=spec,
        grad_step=g.make_grad_step(
            policy,
            spec,
            temperature=temperature,
            max_completion_length=config.rollout.max_new_tokens,
            compile=compile_steps,
        ),
        update_step=g.make_update_step(
            optimizer, max_grad_norm=optim.max_grad_norm or None, compile=compile_steps
        ),
        logprob_step=g.make_logprob_step(policy, temperature=temperature, compile=compile_steps),
        state=g.sync_old(state, quantizer),
        share_prompts=share_prompts,
    )


def _shares_prompts(config: Config, loaded: LoadedModel, platform: Platform) -> bool:
    """Off where not asked for on a GPU: attention over a shared prompt needs an array as its mask there."""
    wish = config.system.share_prompts
    if wish == "never" or (wish == "auto" and platform.backend != "cpu"):
        return False
    # mx.checkpoint would run a block again without the prompts' keys that the first run left behind.
    possible = can_share(loaded.module) and not config.system.grad_checkpoint
    if wish == "always" and not possible:
        raise UserError(
            f'{config.where("system.share_prompts")}: found "always", but this model has a layer without a '
            "plain cache of keys and values, or system.grad_checkpoint is on; want "
            '"auto" or "never"'
        )
    return possible


def _examples(config: Config, rows: tuple, loaded: LoadedModel) -> Data:
    notices = []
    built = []
    for name, part in zip(("train", "eval"), rows, strict=True):
        examples, too_long = build_examples(part, config.data, loaded.tokenizer)
        built.append(examples)
        if part.skipped:
            notices.append(f"{name} data: {part.skipped} bad rows left out (the first: {part.first_fault})")
        if too_long:
            notices.append(
                f"{name} data: {too_long} of {len(part)} prompts left out as over data.max_prompt_length = "
                f"{config.data.max_prompt_length} tokens"
            )
    return Data(built[0], held_out(built[1], config.eval.samples), tuple(notices))


def _collector(
    config: Config,
    learner: Learner,
    rewards: Sequence[Reward],
    decoder: TextDecoder,
    find_stop: FindStop | None,
    loaded: LoadedModel,
    platform: Platform,
) -> Collector:
    rollout = config.rollout
    sampler = g.Sampler(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        with_entropy=config.loss.top_entropy_quantile < 1,
    )

    def generate(params: Tree, examples: Sequence[Example], key: mx.array) -> g.Rollout:
        return g.generate(
            learner.rollout_policy,
            params,
            [example.tokens for example in examples],
            key=key,
            num_generations=rollout.num_generations,
            max_new_tokens=rollout.max_new_tokens,
            sampler=sampler,
            eos_ids=loaded.eos_ids,
            find_stop=find_stop,
            max_batch=rollout.max_batch,
            pipelined=platform.backend != "cpu",
        )

    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    return Collector(generate, scorer, decoder, config)


def _warnings(config: Config, learner: Learner) -> list[str]:
    """What is allowed but seldom meant."""
    rollout, spec = config.rollout, learner.spec
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    warnings = []
    if (truncated or learner.quantizer is not None) and spec.correction == "none":
        cause = "a truncated sampler" if truncated else f"rollout.quantization = {rollout.quantization}"
        warnings.append(
            f"{cause} draws from another distribution than the learner's; watch sampling/sampling_logp_"
            'difference, or set loss.correction = "token_truncate"'
        )
    return warnings


def _reward_dirs(config: Config) -> list[Path]:
    """Where modules of rewards are looked for: the current folder, then the config's."""
    return [Path.cwd(), *([config.settings.folder] if config.settings else [])]
