"""A budget of bits: measured effects of rounding, and formats within the budget."""

import hypothesis.strategies as st
import mlx.core as mx
import pytest
from hypothesis import given

from grpo_fn.policy.quantized_role import formats_within, quantized_role, rounding_effects
from grpo_fn.trees import from_names, named_leaves
from tests.support.tiny_policies import lora_policy, tiny_policy, token_rows

SIZE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_effects_are_those_of_rounding_one_weight_alone(tune):
    """A first-order estimate with few probes is within a factor of 5 of the measured mean square."""
    policy = (lora_policy if tune == "lora" else tiny_policy)("llama-untied", **SIZE)
    role = quantized_role(policy, "affine-6")
    tokens = token_rows(6, 16)
    found = rounding_effects(policy, policy.params, role, tokens, mx.full((6,), 16), mx.random.key(0))
    assert found.keys() == set(role.names)

    def logp(params, frozen):
        hidden = policy.hidden(params, tokens[:, :-1], frozen)
        head = policy.head(params, frozen)
        z = head.function(head.params, hidden.reshape(-1, hidden.shape[-1]))
        z = z - mx.logsumexp(z, axis=-1, keepdims=True)
        return mx.take_along_axis(z, tokens[:, 1:].reshape(-1, 1), axis=-1)

    full = logp(policy.params, policy.frozen)
    ratios = []
    for name in role.names:
        alone = {}
        for which, tree, low in (
            ("params", policy.params, role.transform(policy.params)),
            ("frozen", policy.frozen, role.policy.frozen),
        ):
            leaves, rounded = named_leaves(tree), named_leaves(low)
            alone[which] = from_names(
                {leaf: rounded[leaf] if leaf == name else leaves[leaf] for leaf in leaves}
            )
        measured = mx.square(logp(**alone) - full).mean().item()
        ratios.append(found[name] / measured)
    assert min(ratios) > 0.2 and max(ratios) < 5


EFFECTS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.tuples(st.floats(1e-9, 1.0), st.sampled_from([64, 128, 4096])),
    min_size=1,
    max_size=12,
)


@given(EFFECTS, st.floats(3.5, 9.0))
def test_formats_stay_within_the_budget_and_use_it(found, budget):
    """Within the budget, and without room for a finer format of any weight."""
    effects = {name: effect for name, (effect, _) in found.items()}
    sizes = {name: size for name, (_, size) in found.items()}
    formats = formats_within(effects, sizes, 4, 64, budget)
    bits = {name: int(form[-1]) for name, form in formats.items()}
    left = (budget - 0.5) * sum(sizes.values()) - sum(bits[name] * sizes[name] for name in sizes)
    assert left >= -1e-6 * sum(sizes.values())
    for name in sizes:
        finer = {3: 4, 4: 6, 6: 8}.get(bits[name])
        assert finer is None or (finer - bits[name]) * sizes[name] > left - 1e-6


def test_bits_go_where_the_effect_is():
    """The weight with the larger effect gets more; a budget below the coarsest format is refused."""
    sizes = {"a": 64, "b": 64}
    assert formats_within({"a": 1.0, "b": 1e-6}, sizes, 4, 64, 6.0) == {"a": "affine-8", "b": "affine-3"}
    assert formats_within({"a": 1.0, "b": 1.0}, sizes, 4, 64, 4.5) == dict.fromkeys("ab", "affine-4")
    with pytest.raises(ValueError, match=r"budget: expected at least 3\.5 bits, found 3"):
        formats_within({"a": 1.0}, sizes, 4, 64, 3.0)
