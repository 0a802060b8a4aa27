"""Checks before a run's first rollout whether the model decodes what it learns. The answer is cached."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs

import grpo_fn as g
from grpo_fn.backends import disabled_names
from grpo_fn.trees import Tree
from runners.config.loading import Config
from runners.machine.startup import Platform
from runners.tuning.model_comparison import Checked, Way, compare
from runners.tuning.saved_answers import cache_file, recall, remember


def check_model(
    config: Config,
    policy: g.Policy,
    params: Tree,
    prompts: Sequence[Sequence[int]],
    way: Way,
    *,
    model_config: dict[str, Any],
    platform: Platform,
    role: str = "policy",
    say: Callable[[str], None] = lambda text: None,
) -> Checked:
    """The fastest way with correct numbers; from the cache if it is known.

    Args:
        policy, params: the policy that decodes, and its parameters.
        prompts: token ids of the run's prompts.
        way: the fastest way that the policy offers.
        model_config: the model's config.json.
        role: "policy", whose gradient is checked as well, or "rollout" for a sampler with its own weights.

    Raises:
        UserError: even on the plainest way the model decodes something else than it learns, its log-probs or
            gradients are not finite, or mlx-lm cannot compute it here.
    """
    if not config.system.check_model or not prompts:
        return Checked(way)
    facts = _facts(config, policy, way, model_config, platform, role)
    file = cache_file()
    kept, fault = recall(file, facts)
    found = None if kept is None else _read(kept, way)
    if found is None:
        say("checking that the model decodes what it learns")
        found = compare(
            policy,
            params,
            prompts,
            way,
            learns=role == "policy",
            recomputes=config.system.grad_checkpoint,
        )
        answer = attrs.asdict(found.way) | {"notices": list(found.notices)}
        fault = remember(file, facts, answer) or fault
    return attrs.evolve(found, notices=(*found.notices, *([fault] if fault else [])))


def _facts(
    config: Config,
    policy: g.Policy,
    way: Way,
    model_config: dict[str, Any],
    platform: Platform,
    role: str,
) -> dict[str, Any]:
    """All facts that an answer depends on."""
    shape = json.dumps(model_config, sort_keys=True, default=str)
    return {
        "check": role,
        "backend": platform.backend,
        "device": platform.device,
        "cores": platform.cores,
        "blas": platform.blas,
        "versions": [g.__version__, *(importlib.metadata.version(name) for name in ("mlx", "mlx-lm"))],
        "model": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "tune": [config.model.tune, attrs.asdict(config.model.lora) if config.model.tune != "full" else None],
        "compute": str(policy.compute_dtype),
        "quantization": [config.rollout.quantization, config.rollout.storage],
        "grad_checkpoint": config.system.grad_checkpoint,
        "disabled": list(disabled_names()),
        "offered": attrs.asdict(way),
    }


def _read(kept: dict[str, Any], offered: Way) -> Checked | None:
    """A cached answer; None if it is damaged."""
    notices = kept.get("notices")
    values: dict[str, Any] = {name: kept.get(name) for name in attrs.fields_dict(Way)}
    if not all(isinstance(value, bool) for value in values.values()):
        return None
    if not isinstance(notices, list) or not all(isinstance(line, str) for line in notices):
        return None
    return Checked(Way(**values), tuple(notices))
