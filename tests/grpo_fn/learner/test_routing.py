"""Models with experts: their load, the loss that balances it, and replayed routing."""

from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from benchmarks.architectures.small_settings import VOCABULARY
from grpo_fn.algorithm import load_balancing_loss
from grpo_fn.learner import chosen_experts, halve_batch, routing_stats, split_batch, take_rows
from grpo_fn.policy import check_replay, checkpoint_layers, experts_per_token, has_routers
from grpo_fn.policy.layers.routers import recorded_routing
from grpo_fn.trees import arrays_of, named_leaves
from tests.support.closeness import assert_same_gradients
from tests.support.naive_learner import accumulated

NAMES = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "olmoe")
PROMPT, LENGTH = 3, 8


def batch_of(rows=3, seed=0):
    """Completions of different lengths after prompts of the same length."""
    tokens_bl = mx.random.randint(0, VOCABULARY, (rows, LENGTH), mx.int32, key=mx.random.key(seed))
    width = LENGTH - PROMPT
    mask_bt = mx.arange(width)[None] < mx.array([[width], [2], [4]])[:rows]
    return g.Batch(
        tokens_bl=tokens_bl,
        prompt_lengths_b=mx.full((rows,), PROMPT, mx.int32),
        targets_bt=tokens_bl[:, PROMPT:],
        mask_bt=mask_bt,
        advantages_b=mx.array([1.0, -0.5, 0.0])[:rows],
        rollout_logp_bt=mx.full((rows, width), -4.0),
        num_sequences=mx.array(float(rows)),
        num_tokens=mask_bt.sum().astype(mx.float32),
    )


def by_hand(module, tokens_bl):
    """Each router's logits, computed from its block's input."""
    seen = []
    for layer in module.layers:
        for part in layer.modules():
            gate = part.get("gate", part.get("router")) if "Block" in type(part).__name__ else None
            if gate is not None:

                class Spying(type(part)):
                    def __call__(self, x, gate=gate):
                        bias = gate.bias if "bias" in gate else 0
                        seen.append((x @ gate.weight.T + bias).reshape(-1, 4))
                        return super().__call__(x)

                part.__class__ = Spying
    module(tokens_bl)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_routers_are_recorded(name):
    """The recorded logits are those of the blocks, and the hidden states are unchanged."""
    policy = g.Policy.from_module(small_model(name), patched=False)
    tokens = batch_of().tokens_bl
    hidden, routing = policy.hidden_and_routing(policy.params, tokens)
    assert mx.array_equal(hidden, policy.hidden(policy.params, tokens)).item()
    want = by_hand(policy.module, tokens)
    assert len(routing) == len(want) == 4 and experts_per_token(policy.module) == 2
    for found, wanted in zip(routing, want, strict=True):
        assert float(mx.abs(found.reshape(-1, 4) - wanted).max()) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_gradient_has_the_balance(name):
    """The gradient's difference is the coefficient times that of the balancing loss."""
    coef, batch = 0.3, batch_of()
    policy = g.Policy.from_module(small_model(name))
    (plain, _), (found, _) = (accumulated(policy, batch, router_aux_coef=each) for each in (0.0, coef))

    def balance(params):
        _, routing = policy.hidden_and_routing(params, batch.tokens_bl)
        picked = [logits[:, PROMPT - 1 : -1].reshape(-1, 4) for logits in routing]
        losses = [load_balancing_loss(x, batch.mask_bt.reshape(-1), 2) for x in picked]
        return coef * 3.0 * sum(losses) / len(losses)  # 3 sequences: the denominator

    want = mx.grad(balance)(policy.params)
    difference = tree_map(lambda a, b: a - b, found.accum_grads, plain.accum_grads)
    # Of absolute differences: some leaves have no gradient of the balance, and a GPU rounds two passes apart.
    apart = tree_map(lambda a, b: mx.abs(a - b).max(), difference, want)
    assert max(float(x) for x in arrays_of(apart)) < 1e-6
    assert max(float(mx.abs(x).max()) for x in arrays_of(want)) > 1e-3


def test_the_load_of_a_batch():
    """The statistics equal counts by hand."""
    policy = g.Policy.from_module(small_model("qwen3_moe"))
    batch = batch_of()
    stats = routing_stats(policy, policy.params, batch)
    _, routing = policy.hidden_and_routing(policy.params, batch.tokens_bl)
    loads, unused = [], []
    for logits in routing:
        chosen = np.argsort(-np.array(logits[:, PROMPT - 1 : -1]), axis=-1)[..., :2]
        counts = np.bincount(chosen[np.array(batch.mask_bt)].ravel(), minlength=4)
        loads.append(counts.max() / counts.mean())
        unused.append((counts == 0).mean())
    assert stats.max_load.item() == pytest.approx(max(loads))
    assert stats.unused.item() == pytest.approx(np.mean(unused))


def test_what_is_refused():
    """No experts, biased routers, checkpointed blocks; after an error the routers are restored."""
    dense = g.Policy.from_module(small_model("qwen3"))
    assert not has_routers(dense.module)
    with pytest.raises(ValueError, match=r"qwen3 has no experts .* supported models: qwen3_moe"):
        g.make_grad_step(dense, g.preset("grpo"), router_aux_coef=0.1)
    with pytest.raises(ValueError, match="glm4_moe has no experts that are chosen in a supported way"):
        experts_per_token(small_model("glm4_moe"))
    module = small_model("qwen3_moe")
    checkpoint_layers(module)
    with pytest.raises(ValueError, match="checkpointed blocks do not return"):
        experts_per_token(module)
    with pytest.raises(RuntimeError), g.Policy.from_module(small_model("olmoe")).bound({}) as bound:
        model: Any = bound
        gate = model.layers[0].mlp.gate
        with recorded_routing(model):
            assert model.layers[0].mlp.gate is not gate
            raise RuntimeError
    assert model.layers[0].mlp.gate is gate


REPLAYED = ("qwen3_moe", "mixtral", "gpt_oss")


@pytest.mark.parametrize("name", REPLAYED)
def test_a_models_own_experts_change_nothing(name):
    """Replaying them gives the same hidden states, logits and gradients."""
    policy, batch = g.Policy.from_module(small_model(name)), batch_of()
    own = chosen_experts(policy, policy.params, batch)
    assert own.shape == (3, LENGTH, 4, 2) and own.dtype == mx.uint16
    plain, logits = policy.hidden_and_routing(policy.params, batch.tokens_bl)
    found, recorded = policy.hidden_and_routing(policy.params, batch.tokens_bl, None, own)
    assert float(mx.abs(plain - found).max()) < 1e-5
    assert all(mx.allclose(a, b, atol=1e-5).item() for a, b in zip(logits, recorded, strict=True))
    replayed = attrs.evolve(batch, experts_blnk=own)
    one, other = (accumulated(policy, each, compile=True)[0] for each in (batch, replayed))
    assert_same_gradients(one.accum_grads, other.accum_grads)


@pytest.mark.parametrize("name", REPLAYED)
def test_given_experts_are_the_ones_that_compute(name):
    """Experts that were not given have no gradient, compiled or not."""
    policy, batch = g.Policy.from_module(small_model(name)), batch_of()
    experts = mx.broadcast_to(mx.array([1, 3], mx.uint16), (3, LENGTH, 4, 2))
    batch = attrs.evolve(batch, experts_blnk=experts)
    for compile in (False, True):
        grads = named_leaves(accumulated(policy, batch, compile=compile)[0].accum_grads)
        weights = [grad for path, grad in grads.items() if "experts" in path or "switch_mlp" in path]
        assert weights
        for grad in weights:  # [experts, …]
            moved = mx.abs(grad).reshape(4, -1).max(axis=1) > 0
            assert moved.tolist() == [False, True, False, True]


def test_replay_follows_rows_into_micro_batches():
    """Pieces have the log-probs and gradient of the whole; shared prompts are refused."""
    policy, batch = g.Policy.from_module(small_model("mixtral")), batch_of()
    experts = mx.random.randint(0, 2, (3, LENGTH, 4, 1), key=mx.random.key(1)) * 2
    experts = mx.concatenate([experts, experts + 1], axis=-1).astype(mx.uint16)
    step = g.make_logprob_step(policy)
    whole = step(policy.params, attrs.evolve(batch, experts_blnk=experts))
    assert float(mx.abs(whole - step(policy.params, batch)).max()) > 1e-3
    halves = [take_rows(attrs.evolve(batch, experts_blnk=experts), [row]) for row in range(3)]
    rows = mx.concatenate([step(policy.params, half) for half in halves])
    assert float(mx.abs((whole - rows) * batch.mask_bt).max()) < 1e-5
    shared = attrs.evolve(batch, group_b=mx.zeros((3,), mx.int32))
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    grad_step = g.make_grad_step(policy, g.preset("grpo"))
    wanted = grad_step(state, attrs.evolve(batch, experts_blnk=experts))[0].accum_grads
    cuts: Any = ((8, {}), (20, {}), (20, {"bucketed": False}), (1000, {"share_prompts": True}))
    for tokens, options in cuts:
        pieces = split_batch(attrs.evolve(shared, experts_blnk=experts), max_tokens=tokens, **options)
        for parts in (pieces, [half for piece in pieces for half in halve_batch(piece)]):
            assert_same_gradients(grad_step(state, parts)[0].accum_grads, wanted)
    (piece,) = split_batch(shared, max_tokens=1000, share_prompts=True)
    for refused in (
        lambda: step(policy.params, attrs.evolve(piece, experts_blnk=experts)),
        lambda: chosen_experts(policy, policy.params, piece),
    ):
        with pytest.raises(ValueError, match="without shared prompts"):
            refused()


def test_the_reference_keeps_its_own_routing():
    """The KL compares with the reference's own experts, not the sampler's."""
    policy, batch = g.Policy.from_module(small_model("mixtral")), batch_of()
    experts = mx.broadcast_to(mx.array([0, 1], mx.uint16), (3, LENGTH, 4, 2))
    spec = g.preset("grpo", beta=0.1)
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0), ref_params=policy.params)
    _, stats = g.make_grad_step(policy, spec)(state, attrs.evolve(batch, experts_blnk=experts))
    own = g.make_logprob_step(policy)(policy.params, batch)
    given = attrs.evolve(batch, experts_blnk=experts, ref_logp_bt=own)
    _, wanted = g.make_grad_step(policy, spec)(state, given)
    assert stats.kl.item() == pytest.approx(wanted.kl.item(), rel=1e-4) and float(stats.kl) > 1e-4


def test_what_cannot_be_replayed():
    """Weights that depend on all experts, and arrays of another shape."""
    for name, settings in (("qwen2_moe", {}), ("olmoe", {"norm_topk_prob": False})):
        with pytest.raises(ValueError, match=f"{name} weights its experts by a softmax over all"):
            check_replay(small_model(name, **settings))
    check_replay(small_model("olmoe", norm_topk_prob=True))
    policy = g.Policy.from_module(small_model("mixtral"))
    few = mx.zeros((3, LENGTH, 4, 1), mx.uint16)
    with pytest.raises(ValueError, match=r"experts_blnk has shape \(3, 8, 4, 1\): expected \[B,L,4,2\]"):
        policy.hidden(policy.params, batch_of().tokens_bl, experts_blnk=few)
