"""LossSpec and the presets: what is accepted, and what each refusal says."""

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
    """Fields cannot be assigned; attrs.evolve makes a new value, and checks it."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        g.LossSpec().beta = 0.1
    assert attrs.evolve(g.LossSpec(), beta=0.1).beta == 0.1
    with pytest.raises(ValueError, match="beta"):
        attrs.evolve(g.LossSpec(), beta=-0.1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(level="tokens"), ["level", "'tokens'", "did you mean 'token'"]),
        (dict(surrogate="clipp"), ["surrogate", "'clipp'", "did you mean 'clip'"]),
        (dict(correction="token_trunc"), ["correction", "'token_trunc'", "did you mean 'token_truncate'"]),
        (dict(kl="k33"), ["kl", "'k33'", "did you mean 'k3'"]),
        (
            dict(aggregation="sequence_meen"),
            ["aggregation", "'sequence_meen'", "did you mean 'sequence_mean'"],
        ),
        (dict(aggregation="zzz"), ["aggregation", "'zzz'", "sequence_mean, token_mean, constant"]),
        (dict(aggregation="sequence_sum_norm"), ["aggregation", "'sequence_sum_norm'", "level", "'token'"]),
        (dict(surrogate="none", level="sequence"), ["surrogate", "'none'", "level", "'sequence'"]),
        (dict(surrogate="cispo", delta=4.0), ["delta", "4.0", "'cispo'"]),
        (dict(surrogate="sapo", delta=4.0), ["delta", "4.0", "'sapo'"]),
        (dict(surrogate="none", delta=4.0), ["delta", "4.0", "'none'"]),
        (dict(delta=1.2), ["delta", "1.2", "1 + epsilon_high"]),
        (dict(delta=1.25, epsilon_high=0.28), ["delta", "1.25", "1 + epsilon_high"]),
        (dict(delta=float("nan")), ["delta", "nan"]),
        (dict(surrogate="dual_clip"), ["dual_clip", "None"]),
        (dict(dual_clip=3.0), ["dual_clip", "3.0", "'clip'"]),
        (dict(surrogate="sapo", dual_clip=3.0), ["dual_clip", "3.0", "'sapo'"]),
        (dict(surrogate="dual_clip", dual_clip=1.0), ["dual_clip", "1.0", "> 1"]),
        (dict(epsilon_low=-0.1), ["epsilon_low", "-0.1"]),
        (dict(epsilon_low=1.0), ["epsilon_low", "1.0", "< 1"]),
        (dict(epsilon_low=float("nan")), ["epsilon_low", "nan"]),
        (dict(epsilon_high=-0.1), ["epsilon_high", "-0.1", ">= 0"]),
        (dict(sapo_tau_pos=0.0), ["sapo_tau_pos", "0.0", "> 0"]),
        (dict(sapo_tau_neg=-1.0), ["sapo_tau_neg", "-1.0", "> 0"]),
        (dict(correction_cap=0.0), ["correction_cap", "0.0", "> 0"]),
        (dict(correction_range=(2.0, 0.5)), ["correction_range", "(2.0, 0.5)", "low < high"]),
        (dict(correction_range=(-0.1, 0.5)), ["correction_range", "(-0.1, 0.5)", "0 <= low"]),
        (dict(correction_range=(1.0, 1.0)), ["correction_range", "(1.0, 1.0)"]),
        (dict(correction_range=(1.0,)), ["correction_range", "(1.0,)"]),
        (dict(correction="sequence_mask"), ["'sequence_mask'", "sequence_range"]),
        (dict(correction="token_mask", sequence_range=(2.0, 1.0)), ["sequence_range", "(2.0, 1.0)"]),
        (dict(sequence_range=(0.5, 2.0)), ["sequence_range", "(0.5, 2.0)", "'none'"]),
        (dict(correction="sequence_mask_weighted"), ["'sequence_mask_weighted'", "sequence_range"]),
        (dict(sequence_ratio="prodct"), ["sequence_ratio", "'prodct'", "did you mean 'product'"]),
        (dict(sequence_ratio="product"), ["sequence_ratio", "'product'", "'none'"]),
        (dict(correction="token_mask", sequence_ratio="product"), ["sequence_ratio", "'token_mask'"]),
        (dict(correction_floor=-0.1), ["correction_floor", "-0.1", ">= 0"]),
        (
            dict(correction="token_truncate", correction_floor=2.0),
            ["correction_floor", "2.0", "< correction_cap = 2.0"],
        ),
        (dict(correction="token_mask", correction_floor=0.5), ["correction_floor", "0.5", "'token_mask'"]),
        (dict(beta=-0.1), ["beta", "-0.1", ">= 0"]),
        (dict(entropy_coef=-0.1), ["entropy_coef", "-0.1", ">= 0"]),
        (dict(beta=float("inf")), ["beta", "inf"]),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_rule(fields, said):
    """Each impossible value or combination is refused at construction, in words that lead to the fix."""
    with pytest.raises(ValueError) as error:
        g.LossSpec(**fields)
    assert all(words in str(error.value) for words in said), str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        dict(epsilon_low=0.0, epsilon_high=0.0),
        dict(epsilon_low=0.99),
        dict(delta=1.2001),
        dict(surrogate="dual_clip", dual_clip=1.001, delta=4.0),
        dict(correction_range=(0.0, 0.1)),
        dict(correction="token_truncate", sequence_range=(0.5, 2.0)),
        dict(correction="token_truncate", correction_floor=1.999),
        dict(correction="sequence_truncate", correction_floor=0.5, sequence_ratio="product"),
        dict(correction="token_mask", sequence_range=(0.5, 2.0), sequence_ratio="product"),
        dict(level="sequence", aggregation="sequence_sum_norm"),
        dict(level="sequence", surrogate="cispo"),
    ],
)
def test_the_edges_of_what_is_allowed_are_allowed(fields):
    """Values at the very edge of each rule construct."""
    assert isinstance(g.LossSpec(**fields), g.LossSpec)


def test_lists_become_tuples():
    """TOML gives lists; the spec stays hashable."""
    spec = g.LossSpec(correction="token_mask", correction_range=[0.5, 2.0], sequence_range=[0.9, 1.1])
    assert spec.correction_range == (0.5, 2.0) and spec.sequence_range == (0.9, 1.1)


@pytest.mark.parametrize(
    ("name", "wanted", "recipe"),
    [
        ("grpo", dict(level="token", surrogate="clip", epsilon_low=0.2, aggregation="sequence_mean"), {}),
        ("bnpo", dict(surrogate="clip", epsilon_low=0.2, aggregation="token_mean"), {}),
        ("dr_grpo", dict(surrogate="clip", aggregation="constant"), dict(scale="none")),
        (
            "dapo",
            dict(epsilon_low=0.2, epsilon_high=0.28, aggregation="token_mean"),
            dict(dynamic_sampling=True),
        ),
        (
            "gspo",
            dict(level="sequence", epsilon_low=3e-4, epsilon_high=4e-4, aggregation="sequence_mean"),
            {},
        ),
        ("cispo", dict(surrogate="cispo", epsilon_high=4.0, aggregation="token_mean"), {}),
        ("sapo", dict(surrogate="sapo", sapo_tau_pos=1.0, sapo_tau_neg=1.05), {}),
        ("luspo", dict(level="sequence", aggregation="sequence_sum_norm"), {}),
        ("rloo", dict(surrogate="none"), dict(baseline="leave_one_out", scale="none")),
    ],
)
def test_presets_are_the_published_algorithms(name, wanted, recipe):
    """Each preset's fields, baseline and scale; no preset needs a reference model."""
    spec, found = g.preset(name), g.PRESETS[name]
    assert {field: getattr(spec, field) for field in wanted} == wanted and spec == found.spec
    defaults = dict(baseline="group_mean", scale="group", dynamic_sampling=False)
    assert {key: getattr(found, key) for key in defaults} == defaults | recipe
    assert spec.beta == 0.0 and (found.overlong != 0) == (name == "dapo")


def test_preset_changes_are_checked_and_spelled():
    """A preset takes changes to its fields; a wrong name gets the nearest one."""
    assert g.preset("grpo", epsilon_low=0.1, beta=0.04) == g.LossSpec(epsilon_low=0.1, beta=0.04)
    with pytest.raises(ValueError, match=r"'gropo'.*did you mean 'grpo'"):
        g.preset("gropo")
    with pytest.raises(ValueError, match=r"epsilon_lo\b.*did you mean 'epsilon_low'"):
        g.preset("grpo", epsilon_lo=0.1)
    with pytest.raises(ValueError, match="sequence_sum_norm"):
        g.preset("grpo", aggregation="sequence_sum_norm")


@pytest.mark.parametrize("name", ["beta", "epsilon_low", "sapo_tau_pos"])
def test_a_field_without_none_refuses_it(name):
    with pytest.raises((TypeError, ValueError)):
        g.LossSpec(**{name: None})
