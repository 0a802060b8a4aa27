"""What Hypothesis draws: shapes, masks with holes, advantages, ratios from 1e-6 to 1e6, every legal LossSpec.

Hypothesis chooses the structure (and shrinks it); the numbers come from a seeded NumPy generator, so that
ties have measure zero and every value is exact in float32.
"""

import itertools
import os

import attrs
import numpy as np
from hypothesis import strategies as st

from grpo_fn.algorithm import CHOICES
from grpo_fn.algorithm import SURROGATES as REGISTERED

# Of each choice, the names that the library has registered.
LEVELS, SURROGATES, CORRECTIONS, KLS, AGGREGATIONS = (
    tuple(CHOICES[field]) for field in ("level", "surrogate", "correction", "kl", "aggregation")
)
# Trust regions and whole rows have twins of their own: tests/support/trust_regions.py.
SURROGATES = tuple(name for name in SURROGATES if not (REGISTERED[name].arrays or REGISTERED[name].region))
LOG_MILLION = float(np.log(1e6))


def examples(usual: int) -> int:
    """How many a property gets: `usual`, or twenty times as many where HYPOTHESIS_PROFILE is `campaign`."""
    return usual * (20 if os.environ.get("HYPOTHESIS_PROFILE") == "campaign" else 1)


@attrs.frozen(eq=False)
class LossCase:
    """One call of policy_loss: float32 arrays, [B,T] unless said otherwise, and the spec's fields."""

    fields: dict
    logp: np.ndarray
    adv: np.ndarray  # [B]
    mask: np.ndarray  # 0/1
    old: np.ndarray | None = None
    rollout: np.ndarray | None = None
    ref: np.ndarray | None = None
    entropy: np.ndarray | None = None
    keep: np.ndarray | None = None
    max_completion_length: int | None = None

    def tokens(self):
        """Names of the [B,T] arrays that this case has, the mask apart."""
        names = ("logp", "old", "rollout", "ref", "entropy", "keep")
        return [name for name in names if getattr(self, name) is not None]

    def with_tokens(self, change):
        """The case with `change(array)` in place of each of its [B,T] arrays."""
        return attrs.evolve(self, **{name: change(getattr(self, name)) for name in self.tokens()})


def legal(level, surrogate, aggregation):
    """Whether the mathematics allows these three together."""
    if level == "token" and aggregation == "sequence_sum_norm":
        return False
    return not (level == "sequence" and surrogate in ("none", "likelihood"))


def all_field_sets():
    """Every legal combination of the named choices: level × surrogate × correction × KL × aggregation."""
    kls = [(0.0, "k3", False)] + [(0.3, kind, corrected) for kind in KLS for corrected in (False, True)]
    corrections = [(c, None) for c in CORRECTIONS[:4]] + [(c, (0.6, 1.7)) for c in CORRECTIONS[1:]]
    for level, surrogate, aggregation in itertools.product(LEVELS, SURROGATES, AGGREGATIONS):
        if not legal(level, surrogate, aggregation):
            continue
        for (correction, sequence_range), (beta, kl, corrected) in itertools.product(corrections, kls):
            fields = dict(level=level, surrogate=surrogate, aggregation=aggregation, correction=correction)
            fields |= dict(sequence_range=sequence_range, beta=beta, kl=kl, kl_bias_corrected=corrected)
            fields |= dict(epsilon_low=0.1, epsilon_high=0.28)
            by_sequence = sequence_range is not None or correction == "sequence_truncate"
            fields |= {"sequence_ratio": "product"} if by_sequence and kl == "k2" else {}
            yield fields | ({"dual_clip": 3.0} if surrogate == "dual_clip" else {})


@st.composite
def spec_fields(draw, **fixed):
    """Fields of a legal LossSpec; those given in `fixed` are kept."""
    level = draw(st.sampled_from(LEVELS)) if "level" not in fixed else fixed["level"]
    choices = itertools.product(SURROGATES, AGGREGATIONS)
    surrogate, aggregation = draw(st.sampled_from([c for c in choices if legal(level, *c)]))
    correction = draw(st.sampled_from(CORRECTIONS))
    fields = dict(level=level, surrogate=surrogate, aggregation=aggregation, correction=correction)
    fields["epsilon_low"] = draw(st.sampled_from([3e-4, 0.1, 0.2, 0.9]))
    fields["epsilon_high"] = draw(st.sampled_from([None, 4e-4, 0.28, 4.0]))
    fields["sapo_tau_pos"] = draw(st.sampled_from([1.0, 0.5]))
    fields["sapo_tau_neg"] = draw(st.sampled_from([1.05, 2.0]))
    if surrogate == "dual_clip":
        fields["dual_clip"] = draw(st.sampled_from([1.1, 3.0, 10.0]))
    if surrogate in ("clip", "dual_clip"):
        fields["delta"] = draw(st.sampled_from([None, 5.5, 50.0]))
    fields["correction_cap"] = draw(st.sampled_from([0.8, 2.0, 10.0]))
    fields["correction_range"] = draw(st.sampled_from([(0.5, 5.0), (0.0, 1.2), (0.9, 1.1)]))
    if correction.endswith("_truncate"):
        fields["correction_floor"] = draw(st.sampled_from([0.0, 0.3]))
    if correction.startswith("sequence_mask") or (correction != "none" and draw(st.booleans())):
        fields["sequence_range"] = draw(st.sampled_from([(0.5, 2.0), (0.0, 1.3), (0.95, 1.05)]))
    if "sequence_range" in fields or correction == "sequence_truncate":
        fields["sequence_ratio"] = draw(st.sampled_from(["geometric", "product"]))
    fields["beta"] = draw(st.sampled_from([0.0, 0.04, 1.0]))
    fields["kl"] = draw(st.sampled_from(KLS))
    fields["kl_bias_corrected"] = draw(st.booleans())
    fields["entropy_coef"] = draw(st.sampled_from([0.0, 0.01]))
    return fields | fixed


def make_mask(rng, rows, tokens, style):
    """0/1 [B,T]: `full`, `lengths` (0 and 1 among them), `holes` or `empty`."""
    if style == "full":
        return np.ones((rows, tokens), np.float32)
    if style == "empty":
        return np.zeros((rows, tokens), np.float32)
    if style == "lengths":
        lengths = rng.choice([0, 1, tokens, rng.integers(0, tokens + 1)], size=rows)
        return (np.arange(tokens)[None, :] < lengths[:, None]).astype(np.float32)
    return (rng.random((rows, tokens)) < rng.choice([0.3, 0.7])).astype(np.float32)


def make_drift(rng, shape, regime):
    """Differences of two log-probabilities, nats: `none`, `near`, `wide` (ratios 1e-6 … 1e6), `beyond`."""
    if regime == "near":
        return rng.normal(0.0, 0.3, shape)
    if regime == "wide":
        return rng.uniform(-LOG_MILLION, LOG_MILLION, shape)
    if regime == "beyond":
        return rng.uniform(-45.0, 45.0, shape)
    return np.zeros(shape)


def make_case(seed, fields, *, rows=3, tokens=5, style="holes", drift="near", rollout="near", ref="near",
              old_given=True, keep=False, everything=False):  # fmt: skip
    """A LossCase of the given structure; `everything` also passes arrays that the spec does not need."""
    rng = np.random.default_rng(seed)
    shape = (rows, tokens)
    logp = -np.abs(rng.normal(0.5, 1.5, shape)).astype(np.float32) - np.float32(0.01)
    old = (logp - make_drift(rng, shape, drift)).astype(np.float32)
    base = old if old_given else logp
    adv = rng.normal(0.0, 1.0, rows) * rng.choice([1.0, 10.0], rows) * (rng.random(rows) > 0.2)
    constant = fields.get("aggregation") == "constant"
    rollout_given = everything or fields.get("correction", "none") != "none"
    ref_given = everything or fields.get("beta", 0.0) > 0
    entropy_given = everything or fields.get("entropy_coef", 0.0) > 0
    return LossCase(
        fields=fields,
        logp=logp,
        adv=adv.astype(np.float32),
        mask=make_mask(rng, rows, tokens, style),
        old=old if old_given else None,
        rollout=(base - make_drift(rng, shape, rollout)).astype(np.float32) if rollout_given else None,
        ref=(logp + make_drift(rng, shape, ref)).astype(np.float32) if ref_given else None,
        entropy=rng.uniform(0.0, 4.0, shape).astype(np.float32) if entropy_given else None,
        keep=(rng.random(shape) < 0.6).astype(np.float32) if keep else None,
        max_completion_length=tokens + int(rng.integers(0, 4)) if constant else None,
    )


@st.composite
def loss_cases(draw, fields=None, style=None, drift=None, rows=None, **options):
    """Cases for policy_loss: B 1–6, T 1–9, any mask, any drift, any legal spec."""
    regimes = st.sampled_from(["none", "near", "wide", "beyond"])
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        draw(spec_fields()) if fields is None else fields,
        rows=draw(st.integers(1, 6)) if rows is None else rows,
        tokens=draw(st.integers(1, 9)),
        style=draw(st.sampled_from(["holes", "lengths", "full", "empty"])) if style is None else style,
        drift=draw(regimes) if drift is None else drift,
        rollout=draw(regimes),
        ref=draw(regimes),
        old_given=draw(st.booleans()) if "old_given" not in options else options["old_given"],
        keep=draw(st.booleans()),
        everything=draw(st.booleans()),
    )


@st.composite
def reward_groups(draw, prompts=None, size=None, missing=True):
    """Rewards [P,G] on a grid of eighths (exact in float32, so that ties are real), NaN where missing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (prompts or draw(st.integers(1, 4)), size or draw(st.integers(2, 8)))
    levels = draw(st.sampled_from([2, 3, 40]))
    rewards = rng.integers(-levels, levels, shape).astype(np.float32) / np.float32(8)
    same = rng.random(shape[0]) < 0.3
    rewards[same] = rewards[same][:, :1]
    if missing and draw(st.booleans()):
        rewards[rng.random(shape) < 0.4] = np.nan
    return rewards
