"""Checks before a run's first rollout whether the model decodes what it learns. The answer is cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

import grpo_fn as g
from grpo_fn.backends import disabled_names
from grpo_fn.policy_check import DECODING_PATHS, PATHS, CheckedPolicy, offers_path, without_paths
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.errors import UserError
from runners.files.cache_folder import cache_folder
from runners.files.durable import save_text
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
    """The policy by its fastest path with correct numbers; from the cache if it is known.

    Args:
        policy, params: the policy that decodes, and its parameters.
        prompts: token ids of the run's prompts.
        model_config: the model's config.json.
        share_prompts: whether the learner is to compute a group's prompt once.
        role: "policy", whose gradient is checked as well, or "rollout" for a sampler with its own weights.

    Raises UserError as `grpo_fn.check_policy` raises ValueError.
    """
    if not config.system.check_model or not prompts:
        return CheckedPolicy(policy)
    shape = json.dumps(model_config, sort_keys=True, default=str)
    facts: dict[str, Any] = {  # all that an answer depends on
        "check": role,
        "backend": platform.backend,
        "device": platform.device,
        "cores": platform.cores,
        "blas": platform.blas,
        "versions": [g.__version__, *(importlib.metadata.version(name) for name in ("mlx", "mlx-lm"))],
        "model": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "tune": [config.model.tune, config.model.adapters, attrs.asdict(config.model.lora)]
        if config.model.tune != "full"
        else [config.model.tune],
        "compute": str(policy.compute_dtype),
        "quantization": [config.rollout.quantization, config.rollout.storage],
        "grad_checkpoint": config.system.grad_checkpoint,
        "disabled": list(disabled_names()),
        "offered": [offers_path(policy, path) for path in DECODING_PATHS],
        "learner": [share_prompts, config.system.compile],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    file = cache_folder() / "model_checks" / f"{digest}.json"
    found = _read(file, policy)
    if found is None:
        say("checking that the model decodes what it learns")
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
            raise UserError(f"{error}; {key} = false goes on all the same") from error
        answer = {"given_up": found.given_up, "notices": found.notices, "facts": facts}
        try:
            save_text(file, json.dumps(answer, indent=1) + "\n")
        except UserError as error:
            found = attrs.evolve(found, notices=(*found.notices, f"{error}; the next run checks again"))
    return found


def _read(file: Path, policy: g.Policy) -> CheckedPolicy | None:
    """A cached answer; None if there is none, or what is there cannot be used."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        given_up, notices = tuple(found["given_up"]), tuple(map(str, found["notices"]))
        known = set(given_up) <= set(PATHS)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return CheckedPolicy(without_paths(policy, given_up), given_up, notices) if known else None
