"""LossSpec, the frozen value that selects an algorithm, and AGGREGATIONS, which reduce token
losses.

The learner accumulates an aggregation's sum and denominator separately and divides once, at the
update, so any split of a batch results in the same gradient. To add an aggregation, add a line to
AGGREGATIONS.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import attrs
import mlx.core as mx

from grpo_fn.algorithm.kl import ESTIMATORS
from grpo_fn.algorithm.ratios import CORRECTIONS, LEVELS, SEQUENCE_RATIOS
from grpo_fn.algorithm.surrogates import SURROGATES
from grpo_fn.checks import check_choice


class Aggregation(NamedTuple):
    """How token losses are reduced: the denominator, and whether a row's loss is the mean over its
    unmasked tokens.
    """

    denominator: Callable[[mx.array, mx.array, Any], mx.array]  # (sequences, tokens, L_max) -> 0-d
    row_mean: bool = False
    needs_max_length: bool = False


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_mean": Aggregation(lambda sequences, tokens, longest: sequences, row_mean=True),
    "token_mean": Aggregation(lambda sequences, tokens, longest: tokens),
    "constant": Aggregation(
        lambda sequences, tokens, longest: sequences * longest, needs_max_length=True
    ),
    "sequence_sum_norm": Aggregation(lambda sequences, tokens, longest: sequences),
    "sum": Aggregation(lambda sequences, tokens, longest: mx.zeros_like(tokens)),
}


def divided(total: mx.array, denominator: mx.array) -> mx.array:
    """Divides a summed loss or gradient by its denominator. A denominator of 0 is replaced by 1; it
    means that all tokens are masked, or that the aggregation is `sum`.
    """
    return total / divisor(denominator)


def divisor(denominator: mx.array) -> mx.array:
    """Returns the divisor that `divided` uses."""
    return mx.where(denominator == 0, 1.0, denominator)


def check_max_length(aggregation: str, max_completion_length: int | None) -> None:
    """Raises ValueError if the aggregation divides by L_max and L_max is missing."""
    if AGGREGATIONS[aggregation].needs_max_length and (max_completion_length or 0) < 1:
        raise ValueError(
            f"aggregation = {aggregation!r} requires max_completion_length >= 1; found "
            f"{max_completion_length}"
        )


CHOICES: dict[str, Collection[str]] = {
    "level": LEVELS,
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "sequence_ratio": SEQUENCE_RATIOS,
    "kl": ESTIMATORS,
    "aggregation": AGGREGATIONS,
}
"""The fields of LossSpec that contain a name, with the table in which the names are registered."""

_RANGES: dict[str, Callable[[Any], bool]] = {
    ">= 0": lambda x: 0 <= x < math.inf,
    "> 0": lambda x: 0 < x < math.inf,
    "> 1": lambda x: 1 < x < math.inf,
    "0 <= x < 1": lambda x: 0 <= x < 1,
    "0 <= low < high": lambda pair: (
        isinstance(pair, tuple) and len(pair) == 2 and 0 <= pair[0] < pair[1]
    ),
}


def _key(default: Any, meaning: str, within: str = "", **more: Any) -> Any:
    """Returns a field and its meaning, which docs/config.md and `grpo-run --explain` show."""
    return attrs.field(
        default=default,
        validator=_check_field,
        metadata={"meaning": meaning, "range": within},
        **more,
    )


def _check_field(_: object, field: attrs.Attribute, value: Any) -> None:
    within = field.metadata["range"]
    if field.name in CHOICES:
        check_choice(field.name, value, CHOICES[field.name])
    if within and not (value is None and field.default is None):
        _check(_RANGES[within](value), field.name, value, within)


def _check(holds: bool, name: str, found: object, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, found {found}")


def _pair(value: Sequence[float]) -> tuple[float, float]:
    # A value that is not a pair is refused later, with its name and range.
    return tuple(value) if isinstance(value, list | tuple) else value  # type: ignore[return-value]


@attrs.frozen(kw_only=True)
class LossSpec:
    """loss = level × surrogate × correction × KL × aggregation; `policy_loss` evaluates it.

    Raises ValueError, with the reason, if a value is out of range or a combination is invalid.
    """

    level: str = _key(
        "token", "`token`: one ratio per token; `sequence`: one per completion (GSPO)"
    )
    surrogate: str = _key("clip", "the per-token objective to minimise")
    epsilon_low: float = _key(0.2, "lower clip bound of the ratio: 1 − this value", "0 <= x < 1")
    epsilon_high: float | None = _key(
        None,
        "upper clip bound of the ratio: 1 + this value (`epsilon_low` if the preset sets none)",
        ">= 0",
    )
    delta: float | None = _key(
        None,
        "upper bound on the ratio if A < 0 (two-sided clip); must exceed 1 + `epsilon_high`",
        "> 1",
    )
    dual_clip: float | None = _key(None, "constant c of the `dual_clip` surrogate", "> 1")
    sapo_tau_pos: float = _key(1.0, "SAPO's temperature for tokens with A > 0", "> 0")
    sapo_tau_neg: float = _key(1.05, "SAPO's temperature for all other tokens", "> 0")
    ratio_cap: float = _key(
        20.0, "upper bound C on token weights in the `dppo_tv` and `dppo_kl` surrogates", "> 1"
    )
    dro_beta: float = _key(
        0.05, "coefficient of the squared log-ratio in the `dro` surrogate", "> 0"
    )
    vespo_k_pos: float = _key(2.0, "VESPO's exponent k for completions with A ≥ 0", "> 0")
    vespo_lambda_pos: float = _key(3.0, "VESPO's rate λ for completions with A ≥ 0", "> 0")
    vespo_k_neg: float = _key(3.0, "VESPO's exponent k for completions with A < 0", "> 0")
    vespo_lambda_neg: float = _key(2.0, "VESPO's rate λ for completions with A < 0", "> 0")
    correction: str = _key("none", "how to correct for differences between sampler and learner")
    correction_cap: float = _key(
        2.0, "upper bound C on weights, with `token_truncate` and `sequence_truncate`", "> 0"
    )
    correction_floor: float = _key(
        0.0,
        "lower bound on weights, with `token_truncate` and `sequence_truncate`; must be below "
        "`correction_cap`",
        ">= 0",
    )
    correction_range: tuple[float, float] = _key(
        (0.5, 5.0),
        "`token_mask` keeps tokens whose ratio is in this range",
        "0 <= low < high",
        converter=_pair,
    )
    sequence_range: tuple[float, float] | None = _key(
        None,
        "`sequence_mask` and `sequence_mask_weighted` keep completions whose ratio is in this "
        "range; this can be combined with the other corrections",
        "0 <= low < high",
        converter=_pair,
    )
    sequence_ratio: str = _key(
        "geometric",
        "ratio of a completion: the `geometric` mean of its tokens' ratios, or their `product`, as "
        "in TRL",
    )
    beta: float = _key(
        0.0,
        "coefficient of the KL from the policy to the starting model; 0: no reference model is "
        "loaded",
        ">= 0",
    )
    kl: str = _key("k3", "KL estimator")
    kl_bias_corrected: bool = _key(False, "multiply the KL estimate by the ratio")
    aggregation: str = _key("sequence_mean", "how the token losses are reduced to one number")
    entropy_coef: float = _key(
        0.0, "coefficient of the entropy bonus, which is subtracted from the loss", ">= 0"
    )

    def __attrs_post_init__(self) -> None:
        floor, cap = self.correction_floor, self.correction_cap
        wanted = f"0 <= correction_floor < correction_cap = {cap}"
        _check(floor < cap, "correction_floor", floor, wanted)
        self._check_surrogate()
        self._check_correction()

    @property
    def upper_epsilon(self) -> float:
        """ε_high, or ε_low if ε_high is not set."""
        return self.epsilon_low if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_every_row(self) -> bool:
        """Whether a row with A = 0 still has a gradient (through the KL term or the entropy
        bonus)."""
        return self.beta > 0 or self.entropy_coef > 0

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the values of these fields by name; `epsilon_high` is always a number."""
        found = {name: getattr(self, name) for name in names}
        return found | ({"epsilon_high": self.upper_epsilon} if "epsilon_high" in found else {})

    def _check_surrogate(self) -> None:
        if self.aggregation == "sequence_sum_norm" and self.level != "sequence":
            raise ValueError(
                "aggregation = 'sequence_sum_norm' weights a sequence's loss by its length "
                f"(LUSPO) and requires level = 'sequence'; found level = {self.level!r}"
            )
        if self.level not in SURROGATES[self.surrogate].levels:
            raise ValueError(
                f"surrogate = {self.surrogate!r} does not use a ratio of a whole completion, so "
                f"level = 'sequence' is invalid; use level = 'token'"
            )
        if self.delta is not None:
            if "delta" not in SURROGATES[self.surrogate].fields:
                raise ValueError(
                    f"delta = {self.delta} bounds the ratio of the surrogates clip and dual_clip; "
                    f"found surrogate = {self.surrogate!r}"
                )
            wanted = "delta > 1 + epsilon_high, the clip"
            _check(self.delta > 1 + self.upper_epsilon, "delta", self.delta, wanted)
        if (self.surrogate == "dual_clip") != (self.dual_clip is not None):
            raise ValueError(
                f"surrogate = {self.surrogate!r} with dual_clip = {self.dual_clip}: the constant "
                f"belongs to surrogate 'dual_clip', which requires it (3.0 in the paper)"
            )

    def _check_correction(self) -> None:
        if (
            self.correction in ("sequence_mask", "sequence_mask_weighted")
            and self.sequence_range is None
        ):
            raise ValueError(
                f"correction = {self.correction!r} requires sequence_range = (low, high)"
            )
        if self.correction == "none" and self.sequence_range is not None:
            raise ValueError(
                f"sequence_range = {self.sequence_range} has no effect with correction = 'none'; "
                "use correction = 'sequence_mask'"
            )
        if self.correction != "none" and SURROGATES[self.surrogate].by_sampler:
            raise ValueError(
                f"correction = {self.correction!r}: expected 'none', as surrogate = "
                f"{self.surrogate!r} weights each token by π/μ itself"
            )
        correction = CORRECTIONS[self.correction]
        if self.correction_floor > 0 and "correction_floor" not in correction.fields:
            raise ValueError(
                f"correction_floor = {self.correction_floor} has no effect with correction = "
                f"{self.correction!r}; it is the lower bound of 'token_truncate' and "
                "'sequence_truncate'"
            )
        by_sequence = correction.by_sequence or self.sequence_range is not None
        if self.sequence_ratio == "product" and not by_sequence:
            raise ValueError(
                f"sequence_ratio = 'product' has no effect with correction = {self.correction!r} "
                "and no sequence_range: nothing depends on the sequence ratio"
            )
