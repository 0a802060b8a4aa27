"""Builds a run's functional core from its config: policies, compiled steps and the initial
state.
"""

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import mlx.core as mx
from mlx.optimizers import join_schedules

import grpo_fn as g
from grpo_fn.policy import (
    QuantizedRole,
    check_replay,
    checkpoint_layers,
    checkpoint_mlps,
    experts_per_token,
    is_quantized,
)
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.data.stream import RunLength
from runners.engines.engine import Advance, Engine
from runners.engines.local import LocalEngine
from runners.engines.settings import decoding_of
from runners.errors import UserError, error_line, is_out_of_memory
from runners.machine.startup import Platform
from runners.memory.sizes import checkpoints_mlps, shares_prompts
from runners.models.loaded_model import LoadedModel
from runners.models.model_check import check_model
from runners.models.role_quantization import make_quantized_role
from runners.tokenization.text import TextDecoder
from runners.training.sampler import Sampler, first_sampler
from runners.training.teacher import Grader, make_grader

# Model types by backend; `python -m benchmarks.architectures` compares every architecture's gradients.
_WRONG_GRADIENTS = {"cuda": ("gpt_oss",)}


@attrs.frozen(eq=False)
class Learner:
    """The functional core of a run: its policies, its steps, and the initial state."""

    policy: g.Policy
    sampling: g.Policy  # the same function with a separate module, for the sampler
    quantized: QuantizedRole | None  # the checked role for the sampler; None: full precision
    sampler: Sampler  # the initial one
    engine: Engine  # samples rollouts; the loop loads its weights
    held_out: Engine  # samples evaluations, with the learner's weights
    reference: QuantizedRole | None  # for the KL term; None: the learner's function
    spec: g.LossSpec
    grad_step: g.GradStep
    update_step: Callable[[g.TrainState], tuple[g.TrainState, g.UpdateStats]]
    logprob_step: Callable[[Tree, g.Batch], mx.array]
    sft_step: g.GradStep  # for supervised updates
    gold_logprob_step: Callable[
        [Tree, g.Batch], mx.array
    ]  # at temperature 1, like the supervised loss
    state: g.TrainState | None  # the initial state; None once the loop owns it
    share_prompts: bool  # whether a group's prompt is computed once
    grader: Grader | None = None  # the teacher, if there is one
    notices: tuple[str, ...] = ()


def build_learner(
    config: Config,
    loaded: LoadedModel,
    length: RunLength,
    platform: Platform,
    prompts: Sequence[Sequence[int]] = (),
    decoder: TextDecoder | None = None,
    say: Callable[[str], None] = lambda text: None,
    advance: Advance | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Learner:
    """Builds policies, steps and the initial state. The trainable weights are removed from the
    loaded module.

    If `prompts` (token ids from the run's data) are given, they are used to check the model: see
    `check_model`.
    """
    rollout = config.rollout
    spec = config.loss_spec()
    share_prompts = _shares_prompts(config, loaded, platform)
    check_backend(loaded, platform)
    _check_routers(config, loaded)
    if config.system.grad_checkpoint:
        checkpoint_layers(loaded.module)
    policy = _policy(loaded)
    if checkpoints_mlps(config):
        checkpoint_mlps(policy.module)
    params = policy.params
    check = partial(
        check_model,
        config,
        prompts=prompts,
        model_config=loaded.config,
        platform=platform,
        share_prompts=share_prompts,
        say=say,
    )
    found = check(policy, params)
    policy = found.policy
    notices = list(found.notices)
    sampling = policy.twin()
    compile_steps = config.system.compile and "compile" not in found.given_up
    quantized = None
    if rollout.quantization != "none" and is_quantized(policy.module):
        # With adapters on packed weights, nothing is left to round: the weights are quantized
        # already.
        notices.append(
            f"rollout.quantization = {rollout.quantization} has no effect: the model's weights "
            "are already quantized, and sampler and learner use the same weights"
        )
    elif quantized := make_quantized_role(
        config, sampling, "rollout.quantization", rollout.storage, notices
    ):
        try:
            checked = check(quantized.policy, quantized.transform(params), role="rollout")
        except UserError as error:
            # The run continues: sampling uses full precision if the quantized model fails its check.
            notices.append(f"rollout.quantization = {rollout.quantization}: {error}")
        else:
            quantized = attrs.evolve(quantized, policy=checked.policy)
            notices += checked.notices
    reference = make_quantized_role(
        config, policy, "loss.ref_quantization", config.loss.ref_storage, notices
    )
    policy = policy.without_weights()
    sampling = sampling.without_weights()
    share_prompts = share_prompts and "share_prompts" not in found.given_up
    grader = make_grader(
        config,
        policy,
        params,
        loaded,
        platform,
        share_prompts=share_prompts,
        compile=compile_steps,
    )
    if grader is not None and grader.in_loss and not config.teacher.hint:
        share_prompts = grader.share_prompts

    optimizer = _optimizer(config, length)
    ref_params = None
    if spec.beta > 0:
        ref_params = params if reference is None else reference.transform(params)
    key = mx.random.key(config.run.seed)
    return Learner(
        policy=policy,
        sampling=sampling,
        quantized=quantized,
        sampler=first_sampler(config, quantized),
        # An engine that runs in parallel with the learner does not report progress.
        engine=LocalEngine(
            decoder, decoding_of(config), None if rollout.max_staleness else advance, note
        ),
        held_out=LocalEngine(decoder, decoding_of(config), advance, note),
        reference=reference,
        spec=spec,
        grad_step=g.make_grad_step(
            policy,
            spec,
            temperature=rollout.temperature,
            max_completion_length=rollout.max_new_tokens,
            ref_policy=None if reference is None else reference.policy,
            router_aux_coef=config.loss.router_aux_coef,
            teacher=None if grader is None else grader.teacher,
            compile=compile_steps,
        ),
        update_step=g.make_update_step(
            optimizer,
            max_grad_norm=config.optim.max_grad_norm or None,  # 0 does not clip
            compile=compile_steps,
        ),
        logprob_step=g.make_logprob_step(
            policy, temperature=rollout.temperature, compile=compile_steps
        ),
        sft_step=g.make_sft_step(
            policy, router_aux_coef=config.loss.router_aux_coef, compile=compile_steps
        ),
        gold_logprob_step=g.make_logprob_step(policy, compile=compile_steps),
        state=g.sync_old(g.init_state(params, optimizer, key=key, ref_params=ref_params)),
        share_prompts=share_prompts,
        grader=grader,
        notices=tuple(notices),
    )


def _optimizer(config: Config, length: RunLength) -> g.Optimizer:
    """Creates AdamW, with a schedule that restarts after the supervised updates."""
    optim = config.optim
    stages = (
        (config.sft.learning_rate, length.supervised_updates),
        (optim.learning_rate, length.updates - length.supervised_updates),
    )
    rates = [
        g.warmup_schedule(optim.schedule, rate, updates, optim.warmup_ratio)
        for rate, updates in stages
        if updates
    ]
    return g.adamw(
        join_schedules(rates, [length.supervised_updates]) if len(rates) > 1 else rates[0],
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        moment_dtype=getattr(mx, optim.moments),
    )


def _policy(loaded: LoadedModel) -> g.Policy:
    """Creates the learner's policy. Raises UserError if mlx-lm cannot compute the model on this
    machine.
    """
    try:
        return g.Policy.from_module(loaded.module, compute_dtype=loaded.compute_dtype)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{loaded.path}: mlx-lm cannot compute this model here: {error_line(error)}"
        ) from error


def check_backend(loaded: LoadedModel, platform: Platform) -> None:
    """Raises UserError if the model's gradient is known to be wrong on this backend."""
    family = str(loaded.config.get("model_type"))
    if family in _WRONG_GRADIENTS.get(platform.backend, ()):
        raise UserError(
            f"{loaded.path}: gradients of {family} are wrong with MLX's {platform.backend} backend "
            "(docs/models.md, On CUDA); expected a different model, or MLX's CPU or Metal backend"
        )


def _check_routers(config: Config, loaded: LoadedModel) -> None:
    """Raises UserError if this model does not support loss.router_aux_coef or
    loss.router_replay.
    """
    for key, off, check in (
        ("router_aux_coef", "0", experts_per_token),
        ("router_replay", "false", check_replay),
    ):
        if not getattr(config.loss, key):
            continue
        try:
            if config.system.grad_checkpoint:
                raise ValueError(
                    "blocks do not return their routers' decisions if system.grad_checkpoint is on"
                )
            check(loaded.module)
        except ValueError as error:
            raise UserError(f"{config.where(f'loss.{key}')}: {error}; expected {off}") from error


def _shares_prompts(config: Config, loaded: LoadedModel, platform: Platform) -> bool:
    """Returns whether the learner computes a group's prompt once. Raises UserError if the config
    requires prompt sharing but the model or another setting does not allow it.
    """
    shares = shares_prompts(config, platform, loaded.module)
    if config.system.share_prompts == "always" and not shares:
        raise UserError(
            f'{config.where("system.share_prompts")}: expected "auto" or "never", found "always": '
            "this model has a layer without a plain key-value cache, or "
            "system.grad_checkpoint, loss.router_aux_coef or loss.router_replay is on"
        )
    return shares
