"""LossSpec and the presets: what is accepted, and what each refusal says."""

from typing import Any

import attrs
import pytest
from hypothesis import given

import grpo_fn as g
from tests.support.properties.strategies import spec_fields


@given(fields=spec_fields())
def test_every_legal_combination_is_accepted_and_kept(fields):
    """A legal LossSpec holds exactly the values that it was given, and is hashable and equal by value."""
    spec = g.LossSpec(**fields)
    assert {name: getattr(spec, name) for name in fields} == fields
    assert spec == g.LossSpec(**fields) and hash(spec) == hash(g.LossSpec(**fields))


def test_a_spec_is_frozen():
    """Fields cannot be assigned; attrs.evolve makes a checked new value. TOML's lists become tuples."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(g.LossSpec(), "beta", 0.1)  # noqa: B010
    with pytest.raises(ValueError, match="beta"):
        attrs.evolve(g.LossSpec(), beta=-0.1)
    ranges: Any = {"correction_range": [0.5, 2.0], "sequence_range": [0.9, 1.1]}
    spec = g.LossSpec(correction="token_mask", **ranges)
    assert spec.correction_range == (0.5, 2.0) and spec.sequence_range == (0.9, 1.1)


NAN = float("nan")
REFUSED = {  # by words of the message, a slash between
    "level / 'tokens' / did you mean 'token'": dict(level="tokens"),
    "surrogate / 'clipp' / did you mean 'clip'": dict(surrogate="clipp"),
    "correction / 'token_trunc' / did you mean 'token_truncate'": dict(correction="token_trunc"),
    "kl / 'k33' / did you mean 'k3'": dict(kl="k33"),
    "aggregation / 'sequence_meen' / did you mean 'sequence_mean'": dict(aggregation="sequence_meen"),
    "aggregation / 'zzz' / sequence_mean, token_mean, constant": dict(aggregation="zzz"),
    "aggregation / 'sequence_sum_norm' / level / 'token'": dict(aggregation="sequence_sum_norm"),
    "surrogate / 'none' / level / 'sequence'": dict(surrogate="none", level="sequence"),
    "delta / 4.0 / 'cispo'": dict(surrogate="cispo", delta=4.0),
    "delta / 4.0 / 'sapo'": dict(surrogate="sapo", delta=4.0),
    "delta / 4.0 / 'none'": dict(surrogate="none", delta=4.0),
    "delta / 1.2 / 1 + epsilon_high": dict(delta=1.2),
    "delta / 1.25 / 1 + epsilon_high": dict(delta=1.25, epsilon_high=0.28),
    "delta / nan": dict(delta=NAN),
    "dual_clip / None": dict(surrogate="dual_clip"),
    "dual_clip / 3.0 / 'clip'": dict(dual_clip=3.0),
    "dual_clip / 3.0 / 'sapo'": dict(surrogate="sapo", dual_clip=3.0),
    "dual_clip / 1.0 / > 1": dict(surrogate="dual_clip", dual_clip=1.0),
    "epsilon_low / -0.1": dict(epsilon_low=-0.1),
    "epsilon_low / 1.0 / < 1": dict(epsilon_low=1.0),
    "epsilon_low / nan": dict(epsilon_low=NAN),
    "epsilon_high / -0.1 / >= 0": dict(epsilon_high=-0.1),
    "sapo_tau_pos / 0.0 / > 0": dict(sapo_tau_pos=0.0),
    "sapo_tau_neg / -1.0 / > 0": dict(sapo_tau_neg=-1.0),
    "correction_cap / 0.0 / > 0": dict(correction_cap=0.0),
    "correction_range / (2.0, 0.5) / low < high": dict(correction_range=(2.0, 0.5)),
    "correction_range / (-0.1, 0.5) / 0 <= low": dict(correction_range=(-0.1, 0.5)),
    "correction_range / (1.0, 1.0)": dict(correction_range=(1.0, 1.0)),
    "correction_range / (1.0,)": dict(correction_range=(1.0,)),
    "'sequence_mask' / sequence_range": dict(correction="sequence_mask"),
    "sequence_range / (2.0, 1.0)": dict(correction="token_mask", sequence_range=(2.0, 1.0)),
    "sequence_range / (0.5, 2.0) / 'none'": dict(sequence_range=(0.5, 2.0)),
    "'sequence_mask_weighted' / sequence_range": dict(correction="sequence_mask_weighted"),
    "sequence_ratio / 'prodct' / did you mean 'product'": dict(sequence_ratio="prodct"),
    "sequence_ratio / 'product' / 'none'": dict(sequence_ratio="product"),
    "sequence_ratio / 'product' / 'token_mask'": dict(correction="token_mask", sequence_ratio="product"),
    "correction_floor / -0.1 / >= 0": dict(correction_floor=-0.1),
    "correction_floor / 2.0 / < correction_cap": dict(correction="token_truncate", correction_floor=2.0),
    "correction_floor / 0.5 / 'token_mask'": dict(correction="token_mask", correction_floor=0.5),
    "beta / -0.1 / >= 0": dict(beta=-0.1),
    "beta / inf": dict(beta=float("inf")),
    "entropy_coef / -0.1 / >= 0": dict(entropy_coef=-0.1),
}


@pytest.mark.parametrize(("words", "fields"), REFUSED.items(), ids=REFUSED)
def test_a_refusal_names_the_field_the_value_and_the_rule(words, fields):
    """Each impossible value or combination is refused at construction, in words that lead to the fix."""
    with pytest.raises(ValueError) as error:
        g.LossSpec(**fields)
    assert all(part in str(error.value) for part in words.split(" / ")), str(error.value)


def test_preset_changes_are_checked_and_spelled():
    """A preset takes changes to its fields; a wrong name gets the nearest one."""
    assert g.preset("grpo", epsilon_low=0.1, beta=0.04) == g.LossSpec(epsilon_low=0.1, beta=0.04)
    with pytest.raises(ValueError, match=r"'gropo'.*did you mean 'grpo'"):
        g.preset("gropo")
    with pytest.raises(ValueError, match=r"epsilon_lo\b.*did you mean 'epsilon_low'"):
        g.preset("grpo", epsilon_lo=0.1)
    with pytest.raises(ValueError, match="sequence_sum_norm"):
        g.preset("grpo", aggregation="sequence_sum_norm")
