"""Checks, before a run's first rollout, whether sampler and learner compute the same log-probs.

A model that has passed is not checked again.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs

import grpo_fn as g
from grpo_fn.backends import disabled_names
from grpo_fn.policy_check import DECODING_PATHS, CheckedPolicy, offers_path
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.errors import UserError
from runners.files.own_folder import remember, remembers
from runners.machine.startup import Platform


def check_model(
    config: Config,
    policy: g.Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    *,
    model_config: dict[str, Any],
    platform: Platform,
    share_prompts: bool,
    role: str = "policy",
    say: Callable[[str], None] = lambda text: None,
) -> CheckedPolicy:
    """Returns the policy, restricted to the fastest code path that computes correct values.

    A model for which all paths are correct is not checked again.

    Args:
        policy, params: the policy that samples, and its parameters.
        prompts: token ids of the run's prompts.
        model_config: the model's config.json.
        share_prompts: whether the learner will compute a group's prompt once.
        role: "policy", whose gradient is checked too, or "rollout" for a sampler that has its own
            weights.

    Raises the ValueErrors of `grpo_fn.check_policy` as UserErrors.
    """
    if not config.system.check_model or not prompts:
        return CheckedPolicy(policy)
    facts = {  # everything that the result depends on
        "check": role,
        "machine": [platform.backend, platform.device, platform.cores, platform.blas],
        "versions": [g.__version__, *map(importlib.metadata.version, ("mlx", "mlx-lm"))],
        "model": model_config,
        "tune": [config.model.tune, config.model.adapters, attrs.asdict(config.model.lora)],
        "compute": str(policy.compute_dtype),
        "quantization": [config.rollout.quantization, config.rollout.storage],
        "grad_checkpoint": config.system.grad_checkpoint,
        "disabled": list(disabled_names()),
        "offered": [offers_path(policy, path) for path in DECODING_PATHS],
        "learner": [share_prompts, config.system.compile],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    if remembers("model_checks", digest):
        return CheckedPolicy(policy)
    say("checking that sampler and learner agree")
    try:
        found = g.check_policy(
            policy,
            params,
            prompts,
            learns=role == "policy",
            share_prompts=share_prompts,
            compile=config.system.compile,
        )
    except ValueError as error:
        key = "system.grad_checkpoint" if "checkpointed" in str(error) else "system.check_model"
        raise UserError(f"{error}; {key} = false trains the model anyway") from error
    if not found.given_up:
        remember("model_checks", digest)
    return found
