"""LossSpec: the frozen value that selects an algorithm."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from grpo_fn.algorithm.aggregation import AGGREGATIONS
from grpo_fn.algorithm.corrections import CORRECTIONS, SEQUENCE_RATIOS
from grpo_fn.algorithm.kl import ESTIMATORS
from grpo_fn.algorithm.ratios import LEVELS
from grpo_fn.algorithm.surrogates import SURROGATES
from grpo_fn.checks import check_choice

CHOICES: dict[str, Collection[str]] = {
    "level": LEVELS,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "sequence_ratio": SEQUENCE_RATIOS,
    "kl": ESTIMATORS,
    "aggregation": AGGREGATIONS,
}
"""The fields of LossSpec that hold a name, with the table in which the names are registered."""


def _check(holds: bool, name: str, found: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} = {found}: wanted {wanted}")


def _pair(value: Sequence[float]) -> tuple[float, float]:
    # A value that is not a pair is refused later, with its name and range.
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


@attrs.frozen(kw_only=True)
class LossSpec:
    """loss = level × surrogate × correction × KL × aggregation; `policy_loss` evaluates it.

    Raises ValueError, with the reason, when a value is out of range or a combination has no meaning.
    """

    level: str = "token"  # of the ratio r: token, or sequence (GSPO's geometric mean)
    surrogate: str = "clip"
    epsilon_low: float = 0.2
    epsilon_high: float | None = None  # None: epsilon_low. For cispo the cap is 1 + epsilon_high
    delta: float | None = None  # upper bound on r where A < 0 (two-sided clip); None: unbounded
    dual_clip: float | None = None  # c of the surrogate dual_clip
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    correction: str = "none"  # for a sampler that is not π_old
    correction_cap: float = 2.0  # C of token_truncate and sequence_truncate
    correction_floor: float = 0.0  # their lower bound
    correction_range: tuple[float, float] = attrs.field(default=(0.5, 5.0), converter=_pair)  # token_mask
    sequence_range: tuple[float, float] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_pair)
    )
    sequence_ratio: str = "geometric"  # a sequence's π_old/μ: geometric mean over its tokens, or product
    beta: float = 0.0  # coefficient of the KL to the reference; 0: no reference is needed
    kl: str = "k3"
    kl_bias_corrected: bool = False  # multiply the estimate by r
    aggregation: str = "sequence_mean"
    entropy_coef: float = 0.0  # of an entropy bonus (subtracted from the loss)

    def __attrs_post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    @property
    def upper_epsilon(self) -> float:
        """ε_high, or ε_low if it was left out."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_every_row(self) -> bool:
        """Whether a row with A = 0 still has a gradient (through the KL term or the entropy bonus)."""
        return self.beta > 0 or self.entropy_coef > 0

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """These fields by name; `epsilon_high` is always a number."""
        found = {name: getattr(self, name) for name in names}
        return found | ({"epsilon_high": self.upper_epsilon} if "epsilon_high" in found else {})

    def _check_ranges(self) -> None:
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        _check(0 <= self.epsilon_low < 1, "epsilon_low", self.epsilon_low, "0 <= epsilon_low < 1")
        _check(0 <= self.upper_epsilon < math.inf, "epsilon_high", self.epsilon_high, "epsilon_high >= 0")
        for name in ("sapo_tau_pos", "sapo_tau_neg", "correction_cap"):
            value = getattr(self, name)
            _check(0 < value < math.inf, name, value, f"{name} > 0")
        _check(
            0 <= self.correction_floor < self.correction_cap,
            "correction_floor",
            self.correction_floor,
            f"0 <= correction_floor < correction_cap = {self.correction_cap}",
        )
        for name in ("beta", "entropy_coef"):
            value = getattr(self, name)
            _check(0 <= value < math.inf, name, value, f"{name} >= 0")
        for name in ("correction_range", "sequence_range"):
            pair = getattr(self, name)
            if pair is not None:
                ordered = isinstance(pair, tuple) and len(pair) == 2 and 0 <= pair[0] < pair[1]
                _check(ordered, name, pair, "(low, high) with 0 <= low < high")

    def _check_combinations(self) -> None:
        if self.aggregation == "sequence_sum_norm" and self.level != "sequence":
            raise ValueError(
                "aggregation = 'sequence_sum_norm' weights a sequence's loss by its length (LUSPO) and "
                f"needs level = 'sequence'; found level = {self.level!r}"
            )
        if self.surrogate == "none" and self.level == "sequence":
            raise ValueError(
                "surrogate = 'none' uses no ratio to the old policy, so level = 'sequence' has no "
                "meaning; use level = 'token'"
            )
        if self.delta is not None:
            if "delta" not in SURROGATES[self.surrogate].fields:
                raise ValueError(
                    f"delta = {self.delta} bounds the ratio of the surrogates clip and dual_clip; found "
                    f"surrogate = {self.surrogate!r}"
                )
            _check(
                self.delta > 1 + self.upper_epsilon, "delta", self.delta, "delta > 1 + epsilon_high, the clip"
            )
        if (self.surrogate == "dual_clip") != (self.dual_clip is not None):
            raise ValueError(
                f"surrogate = {self.surrogate!r} with dual_clip = {self.dual_clip}: the constant belongs to "
                "surrogate 'dual_clip', which needs it (3.0 in the paper)"
            )
        if self.dual_clip is not None:
            _check(1 < self.dual_clip < math.inf, "dual_clip", self.dual_clip, "dual_clip > 1")
        self._check_correction()

    def _check_correction(self) -> None:
        if self.correction in ("sequence_mask", "sequence_mask_weighted") and self.sequence_range is None:
            raise ValueError(f"correction = {self.correction!r} needs sequence_range = (low, high)")
        if self.correction == "none" and self.sequence_range is not None:
            raise ValueError(
                f"sequence_range = {self.sequence_range} has no effect with correction = 'none'; "
                "use correction = 'sequence_mask'"
            )
        correction = CORRECTIONS[self.correction]
        if self.correction_floor > 0 and "correction_floor" not in correction.fields:
            raise ValueError(
                f"correction_floor = {self.correction_floor} has no effect with correction = "
                f"{self.correction!r}; it is the lower bound of 'token_truncate' and 'sequence_truncate'"
            )
        by_sequence = correction.by_sequence or self.sequence_range is not None
        if self.sequence_ratio == "product" and not by_sequence:
            raise ValueError(
                f"sequence_ratio = 'product' has no effect with correction = {self.correction!r} and no "
                "sequence_range: nothing is judged by the sequence"
            )
