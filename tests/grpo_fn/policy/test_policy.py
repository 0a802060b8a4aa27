"""Policy: a module as a pure function of its parameters; the module is left unchanged."""

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from grpo_fn.backends.cuda.decoding import kernel_steps
from grpo_fn.policy.caches.kv_caches import plain_caches, takes_ragged
from grpo_fn.policy.caches.prefix_cache import shares_prefix
from grpo_fn.policy.layers.patched_layers import patch_layers
from grpo_fn.trees import arrays_of, map_arrays
from tests.support.tiny_policies import (
    lora_policy,
    memory_in_use,
    same_tree,
    tiny_module,
    tiny_policy,
    token_rows,
)


def leaf_ids(module):
    """The identity of each array of a module."""
    return {name: id(leaf) for name, leaf in tree_flatten(module.parameters())}


def shifted(params):
    """Other parameters with the same structure."""
    return map_arrays(lambda a: a * 0.9 + 0.01, params)


def test_logits_follow_the_parameters_given():
    """Other parameters give the result of a module that holds them."""
    policy, tokens = tiny_policy(), token_rows(3, 7)
    other = tiny_module(seed=5)
    patch_layers(other)
    assert bool((policy.logits(other.parameters(), tokens) == other(tokens)).all())
    assert bool((policy.logits(policy.params, tokens) != other(tokens)).any())


@pytest.mark.parametrize("compile", [False, True])
def test_the_module_s_leaves_are_put_back(compile):
    """After eager and traced calls, the module holds its own arrays and still runs."""
    policy, tokens = tiny_policy(), token_rows(2, 5)
    held, before = leaf_ids(policy.module), policy.module(tokens)
    step = g.compiled(lambda p: policy.hidden(p, tokens), enabled=compile)
    mx.eval(step(shifted(policy.params)))
    assert leaf_ids(policy.module) == held
    assert bool((policy.module(tokens) == before).all())


def test_the_leaves_are_put_back_after_an_error():
    """After an exception or unknown parameters; a module without trainable leaves is refused."""
    policy = tiny_policy()
    held = leaf_ids(policy.module)
    with pytest.raises(RuntimeError, match="mine"), policy.bound(shifted(policy.params)):
        assert leaf_ids(policy.module) != held
        raise RuntimeError("mine")
    assert leaf_ids(policy.module) == held
    with pytest.raises(ValueError, match="surplus"):
        policy.logits({**shifted(policy.params), "surplus": mx.zeros(3)}, token_rows(1, 2))
    assert leaf_ids(policy.module) == held
    policy.module.freeze()
    with pytest.raises(ValueError, match="no trainable parameters: unfreeze it, or add adapters"):
        g.Policy.from_module(policy.module)


def test_lora_trains_its_adapters_alone():
    """Trainable and frozen leaves are disjoint and complete; a call may replace the frozen tree."""
    policy, tokens = lora_policy(), token_rows(2, 5)
    trainable, frozen = dict(tree_flatten(policy.params)), dict(tree_flatten(policy.frozen))
    assert {name.rsplit(".", 1)[1] for name in trainable} == {"lora_a", "lora_b"} and len(trainable) == 8
    assert not trainable.keys() & frozen.keys()
    whole = dict(tree_flatten(policy.module.parameters()))
    assert trainable.keys() | frozen.keys() == whole.keys()
    assert all({**trainable, **frozen}[name] is leaf for name, leaf in whole.items()), "shared, not copied"
    other = shifted(policy.frozen)
    got = policy.hidden(policy.params, tokens, other)
    want = attrs.evolve(policy, frozen=other).hidden(policy.params, tokens)
    assert bool((got == want).all()) and bool((got != policy.hidden(policy.params, tokens)).any())


def test_the_forward_runs_in_the_compute_dtype():
    """float32 masters with a bfloat16 forward equal the cast model; gradients are float32."""
    module, tokens = tiny_module("llama-untied"), token_rows(2, 5)
    policy = g.Policy.from_module(module, compute_dtype=mx.bfloat16)
    logits = policy.logits(policy.params, tokens)
    assert logits.dtype == mx.bfloat16
    cast = tiny_module("llama-untied", dtype=mx.bfloat16)
    assert bool((logits == cast(tokens)).all())
    grads = mx.grad(lambda p: policy.logits(p, tokens).astype(mx.float32).sum())(policy.params)
    assert {leaf.dtype for leaf in arrays_of(grads)} == {mx.float32}
    assert all(leaf.dtype == mx.float32 for leaf in arrays_of(module.parameters()))


def test_without_weights_no_trainable_ones_are_held():
    """Dropped parameters free their memory; frozen leaves remain."""
    mx.eval(mx.zeros(1))
    before = memory_in_use()
    policy = tiny_policy("llama-untied", hidden_size=64)
    held = memory_in_use() - before
    policy = policy.without_weights()
    assert memory_in_use() - before < 0.05 * held
    adapted = lora_policy()
    frozen = adapted.frozen
    assert same_tree(adapted.without_weights().frozen, frozen)


def test_a_module_without_a_backbone_works_whole():
    """A custom model with other names for its parts is head and backbone in one."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 7)
            self.out = nn.Linear(7, 11)

        def __call__(self, tokens, cache=None):
            return self.out(mx.tanh(self.table(tokens)))

    mx.random.seed(0)
    policy, tokens = g.Policy.from_module(Own()), mx.array([[1, 2, 3]])
    head = policy.head(policy.params)
    assert policy.split.path is None and head.params == {}
    logp = g.token_logprobs(policy.hidden(policy.params, tokens), head, mx.array([[4, 5, 6]]))
    want = nn.losses.cross_entropy(policy.module(tokens), mx.array([[4, 5, 6]]))
    assert float(mx.abs(logp + want).max()) < 1e-6


def module_for_probes(error=None):
    """A model whose first block raises `error`, if given, for more than one row."""
    module = tiny_module()
    patch_layers(module)
    mlp = module.model.layers[0].mlp

    class Failing(type(mlp)):
        def __call__(self, x, *args, **kwargs):
            if error is not None and x.shape[0] > 1:
                raise error
            return super().__call__(x, *args, **kwargs)

    mlp.__class__ = Failing
    return module


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch):
    """Describes decoding steps without CUDA's kernel."""
    monkeypatch.setattr(kernel_steps, "append_and_attend", lambda queries, *_: queries)


PROBES = {
    "takes_ragged": takes_ragged,
    "shares_prefix": shares_prefix,
    "takes_steps": lambda module: kernel_steps.takes_steps(module, plain_caches(module)),
}


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_a_model_that_cannot_be_called_in_a_way_takes_the_plain_one(probe):
    """Any error of the model means no; running out of memory is raised."""
    for error in (ValueError("shapes"), NotImplementedError("no masks here"), AttributeError("no keys")):
        assert probe(module_for_probes(error)) is False
    assert probe(module_for_probes()) is True
    for error in (RuntimeError("[malloc] Unable to allocate 5000000000 bytes."), MemoryError()):
        with pytest.raises(type(error)):
            probe(module_for_probes(error))
