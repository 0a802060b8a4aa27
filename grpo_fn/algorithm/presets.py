"""Presets for published algorithms, by name."""

from typing import Any

import attrs

from grpo_fn.algorithm.spec import LossSpec
from grpo_fn.checks import check_choice


@attrs.frozen(kw_only=True)
class Recipe:
    """A published algorithm: its loss, and the steps that precede the loss."""

    spec: LossSpec
    baseline: str = "group_mean"
    scale: str = "group"
    dynamic_sampling: bool = False
    # DAPO's soft penalty covers this last share of the length limit
    overlong: float = 0.0
    source: str = ""


PRESETS: dict[str, Recipe] = {
    "grpo": Recipe(spec=LossSpec(), source="DeepSeekMath, arXiv 2402.03300, eq. 3"),
    "bnpo": Recipe(spec=LossSpec(aggregation="token_mean"), source="TRL's loss_type 'bnpo'"),
    "dr_grpo": Recipe(
        spec=LossSpec(aggregation="constant"), scale="none", source="Dr. GRPO, arXiv 2503.20783"
    ),
    "dapo": Recipe(
        spec=LossSpec(epsilon_high=0.28, aggregation="token_mean"),
        dynamic_sampling=True,
        overlong=0.2,
        source="DAPO, arXiv 2503.14476, eq. 8",
    ),
    "gspo": Recipe(
        spec=LossSpec(level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
        source="GSPO, arXiv 2507.18071, eq. 5",
    ),
    "cispo": Recipe(
        spec=LossSpec(surrogate="cispo", epsilon_high=4.0, aggregation="token_mean"),
        source="MiniMax-M1, arXiv 2506.13585, eq. 4",
    ),
    "sapo": Recipe(spec=LossSpec(surrogate="sapo"), source="SAPO, arXiv 2511.20347"),
    "luspo": Recipe(
        spec=LossSpec(
            level="sequence", epsilon_low=2e-3, epsilon_high=2.5e-3, aggregation="sequence_sum_norm"
        ),
        source="LUSPO, arXiv 2602.05261; its ε as TRL's paper index quotes them",
    ),
    "rloo": Recipe(
        spec=LossSpec(surrogate="none", aggregation="constant"),
        baseline="leave_one_out",
        scale="none",
        source="RLOO, arXiv 2402.14740",
    ),
}


def preset(name: str, **changes: Any) -> LossSpec:
    """Returns the LossSpec of a named algorithm, after `changes` replace some of its fields.

    Raises:
        ValueError: the name or a field is unknown (with the nearest spelling), or the combination
            is invalid.
    """
    check_choice("preset", name, PRESETS)
    for field in changes:
        check_choice("a field of LossSpec", field, attrs.fields_dict(LossSpec))
    return attrs.evolve(PRESETS[name].spec, **changes)
