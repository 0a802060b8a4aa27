"""GRPO as pure functions on MLX: an immutable TrainState, and compiled steps that return a new one.

Importing it has one effect: on a Linux CPU it loads the machine's BLAS, which must be loaded before MLX. A
name is imported when it is first used, so that `import grpo_fn.algorithm` loads only the algorithm.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("grpo_fn.backends.cpu"):
    import grpo_fn.backends.cpu  # noqa: F401 (first: all others import MLX)

if TYPE_CHECKING:
    from grpo_fn.algorithm import (
        PRESETS,
        LossSpec,
        LossStats,
        combine_rewards,
        group_advantages,
        merge_stats,
        overlong_penalty,
        policy_loss,
        preset,
    )
    from grpo_fn.compile import Compiled, compiled
    from grpo_fn.completions import Rollout, join_rollouts, take_groups
    from grpo_fn.images import PromptImages, multimodal_positions
    from grpo_fn.learner import (
        Batch,
        GradStep,
        Optimizer,
        TrainState,
        UpdateStats,
        adamw,
        all_reduce,
        drop_inactive,
        init_state,
        make_batch,
        make_grad_step,
        make_logprob_step,
        make_update_step,
        minibatches,
        split_batch,
        stochastic_round,
        sync_old,
        sync_ref,
        token_logprobs,
        token_logprobs_and_entropy,
        warmup_schedule,
    )
    from grpo_fn.policy import Policy
    from grpo_fn.policy.head import Head
    from grpo_fn.prng import fold_in
    from grpo_fn.rollout import Decoding, Sampler, generate, sample
    from grpo_fn.trees import materialize

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (in groups)
    # the algorithm: advantages and the loss
    "PRESETS",
    "LossSpec",
    "LossStats",
    "combine_rewards",
    "group_advantages",
    "merge_stats",
    "overlong_penalty",
    "policy_loss",
    "preset",
    # the model, and completions from it
    "Decoding",
    "Policy",
    "PromptImages",
    "Rollout",
    "Sampler",
    "generate",
    "join_rollouts",
    "multimodal_positions",
    "sample",
    "take_groups",
    # batches for the learner
    "Batch",
    "drop_inactive",
    "make_batch",
    "minibatches",
    "split_batch",
    # the state, and the steps from one state to the next
    "GradStep",
    "Optimizer",
    "TrainState",
    "UpdateStats",
    "adamw",
    "all_reduce",
    "init_state",
    "make_grad_step",
    "make_logprob_step",
    "make_update_step",
    "sync_old",
    "sync_ref",
    "warmup_schedule",
    # parts of these steps
    "Head",
    "stochastic_round",
    "token_logprobs",
    "token_logprobs_and_entropy",
    # tools for a custom loop
    "Compiled",
    "compiled",
    "fold_in",
    "materialize",
]

if not TYPE_CHECKING:  # a type checker should report unknown names as errors
    _FOLDERS = ("algorithm", "learner", "policy", "rollout")
    # The modules in which names are searched; those that import least come first.
    _HOMES = (
        "algorithm",
        "compile",
        "completions",
        "images",
        "prng",
        "trees",
        "policy",
        "rollout",
        "learner",
    )

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for home in _HOMES:
                module = import_module(f"{__name__}.{home}")
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
