"""What a person should know about a run's settings before its first step."""

from __future__ import annotations

from grpo_fn.algorithm import SURROGATES
from runners.config.conditions import Condition
from runners.config.loading import Config
from runners.training.learner import Learner


def setting_warnings(config: Config, learner: Learner) -> list[str]:
    """Warnings about settings that are allowed but probably a mistake."""
    rollout, spec = config.rollout, learner.spec
    truncated = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    rounded = bool(learner.engine.metrics()) and learner.engine.fallback is None
    warnings = []
    if rounded and rollout.storage == "dequantized":
        warnings.append(
            'rollout.storage = "dequantized" saves neither memory nor time: rounded weights have full size; '
            '"packed" saves memory, and on Metal time'
        )
    if (truncated or rounded) and spec.correction == "none":
        cause = "a truncated sampler" if truncated else f"rollout.quantization = {rollout.quantization}"
        warnings.append(
            f"{cause} draws from another distribution than the learner's; watch sampling/sampling_logp_"
            'difference, or set loss.correction = "token_truncate"'
        )
    silent = {"kl": "only with loss.beta > 0"} if spec.beta == 0 else {}
    if SURROGATES[spec.surrogate].clipped_sides != ("low", "high"):
        silent |= dict.fromkeys(
            ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
            "only with the surrogates clip and dual_clip",
        )
    if spec.surrogate != "cispo":
        silent["cispo_clip_ratio"] = "only with the surrogate cispo"
    for text in config.stop.when:
        condition = Condition.parse(text)
        if condition and condition.metric in silent:
            when = f"{condition.metric} is logged {silent[condition.metric]}"
            warnings.append(f"stop.when: {condition} is never true, because {when}")
    return warnings
