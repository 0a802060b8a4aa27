"""Quantized roles: which weights are rounded, that both storages agree, and what is refused."""

from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from grpo_fn.policy.quantized_role import MODES, quantized_role
from grpo_fn.trees import arrays_of, map_arrays, named_leaves
from tests.support.tiny_policies import lora_policy, memory_in_use, tiny_policy, token_rows, worst_difference

SIZE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
# Bits of a weight, and so how far rounding may take the logits of a random model from the full ones.
COARSE = {
    "affine-8": 0.05,
    "affine-6": 0.2,
    "affine-4": 0.8,
    "affine-3": 1.5,
    "mxfp8": 0.5,
    "mxfp4": 1.5,
    "nvfp4": 1.2,
}


def wide_policy(name="llama-untied", **options):
    """A tiny policy whose rows are whole groups in every mode."""
    return tiny_policy(name, **SIZE, **options)


def both_storages(policy, mode, tokens, **options):
    """The packed role and the dequantized role's logits, which agree to rounding."""
    found = []
    for storage in ("packed", "dequantized"):
        role = quantized_role(policy, mode, storage, **options)
        found.append((role, role.policy.logits(role.transform(policy.params), tokens)))
    (packed, one), (_, other) = found
    assert worst_difference(one, other) < (1e-5 if one.dtype == mx.float32 else 0.1)
    return packed, other


@pytest.mark.parametrize("name", MODES)
def test_both_storages_are_the_same_rounded_model(name):
    """The logits differ from full precision by as much as the bits suggest."""
    policy, tokens = wide_policy(), token_rows(2, 6)
    _, logits = both_storages(policy, name, tokens)
    assert 1e-4 < worst_difference(logits, policy.logits(policy.params, tokens)) < COARSE[name]


@pytest.mark.parametrize("name", ["affine-8", "affine-4", "nvfp4"])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_experts_are_rounded(model, name):
    """The experts of all layers, in both storages."""
    policy, tokens = g.Policy.from_module(small_model(model)), token_rows(2, 6)
    role, logits = both_storages(policy, name, tokens, group_size=0 if name == "nvfp4" else 32)
    experts = [leaf for leaf in role.names if "_proj" in leaf and "self_attn" not in leaf]
    assert len(experts) == 3 * 4 and not role.unfit
    leaves = named_leaves(role.transform(policy.params))
    assert all(leaves[leaf].dtype == mx.uint32 for leaf in experts)
    bits = {"affine-8": 0.05, "affine-4": 1.0, "nvfp4": 1.4}[name]
    assert 1e-4 < worst_difference(logits, policy.logits(policy.params, tokens)) < bits


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
@pytest.mark.parametrize("name", ["llama", "llama-untied", "gemma2"])
def test_embeddings_norms_and_the_head_keep_their_precision(name, storage):
    """Only matrices of the blocks change; every other leaf keeps its bits."""
    policy = wide_policy(name, head_dim=32)
    role = quantized_role(policy, "affine-4", storage)
    assert role.names and all(".layers." in n and n.endswith("_proj.weight") for n in role.names)
    assert len(role.names) == 2 * 7
    given, made = dict(tree_flatten(policy.params)), dict(tree_flatten(role.transform(policy.params)))
    for leaf_name, leaf in given.items():
        if leaf_name not in role.names:
            assert bool((made[leaf_name] == leaf).all()), leaf_name
    for leaf_name in role.names:
        if storage == "packed":
            assert made[leaf_name].dtype == mx.uint32
            assert made[leaf_name].nbytes * 8 == given[leaf_name].nbytes
            assert leaf_name.replace("weight", "scales") in made
        else:
            assert made[leaf_name].shape == given[leaf_name].shape
            assert bool((made[leaf_name] != given[leaf_name]).any())


def test_a_packed_role_is_small():
    """4 bits per weight plus scale and bias per 64; its module holds no weights."""
    policy = tiny_policy("llama-untied", hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    g.materialize(policy.params)
    before = memory_in_use()
    role = quantized_role(policy, "affine-4", "packed")
    params = role.transform({"model": {"layers": policy.params["model"]["layers"]}})
    g.materialize(params)
    full = sum(dict(tree_flatten(policy.params))[name].nbytes for name in role.names)
    assert memory_in_use() - before < full * (4 + 1.5) / 32
    assert all(leaf.size == 1 for leaf in arrays_of(role.policy.module.parameters()))


@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_with_lora_the_base_is_rounded_and_the_adapters_are_not(storage):
    """The frozen base is quantized once; adapters pass through and change the logits."""
    policy = lora_policy("llama-untied", **SIZE)
    role = quantized_role(policy, "affine-8", storage)
    made = dict(tree_flatten(role.transform(policy.params)))
    assert made.keys() == dict(tree_flatten(policy.params)).keys()
    assert all(bool((made[n] == leaf).all()) for n, leaf in tree_flatten(policy.params))
    tokens = token_rows(2, 6)
    got = role.policy.logits(role.transform(policy.params), tokens)
    full = policy.logits(policy.params, tokens)
    assert 1e-4 < worst_difference(got, full) < COARSE["affine-8"]
    without = map_arrays(mx.zeros_like, policy.params)
    assert worst_difference(got, role.policy.logits(without, tokens)) > 0.01


def test_weights_are_rounded_in_the_compute_dtype():
    """With a bfloat16 forward, the role's leaves are bfloat16."""
    policy = wide_policy(compute_dtype=mx.bfloat16)
    for storage in ("packed", "dequantized"):
        made = quantized_role(policy, "affine-8", storage).transform(policy.params)
        kinds = {leaf.dtype for leaf in arrays_of(made)}
        assert kinds == ({mx.bfloat16, mx.uint32} if storage == "packed" else {mx.bfloat16})


@pytest.mark.parametrize(
    "make, name, options, message",
    [
        (wide_policy, "affine-5", {}, r"'affine-5' is not one of .*did you mean 'affine-\d'"),
        (wide_policy, "mxfp-8", {}, "did you mean 'mxfp8'"),
        (wide_policy, "affine-4", {"storage": "pack"}, "did you mean 'packed'"),
        (tiny_policy, "affine-4", {}, "no weight can be quantized as affine-4, .*a multiple of 64"),
        (partial(lora_policy, packed=True, **SIZE), "affine-4", {}, "already quantized"),
        (lambda: wide_policy().without_weights(), "affine-4", {}, "no weights to quantize"),
        (wide_policy, "affine-4", {"group_size": 16}, "group_size = 16: mlx packs groups of 32, 64, 128"),
        (wide_policy, "affine-8", {"group_size": -1}, "group_size = -1"),
        (wide_policy, "mxfp4", {"group_size": 64}, "the group size of mxfp4 is always 32"),
        (wide_policy, "nvfp4", {"group_size": 32}, "the group size of nvfp4 is always 16"),
    ],
)
def test_what_cannot_be_quantized_is_refused(make, name, options, message):
    """Unknown names, weights that do not fit or are packed or gone, and wrong group sizes."""
    with pytest.raises(ValueError, match=message):
        quantized_role(make(), name, **options)


def test_rows_that_do_not_fit_keep_their_precision():
    """Such a matrix is named and left alone; a smaller group may fit."""
    policy = tiny_policy("llama-untied", hidden_size=64, intermediate_size=96)
    role = quantized_role(policy, "affine-4")
    assert [name.split(".")[-2] for name in role.unfit] == ["down_proj"] * 2 and len(role.names) == 2 * 6
    role = quantized_role(policy, "affine-4", group_size=32)
    assert role.unfit == () and len(role.names) == 2 * 7


@pytest.mark.parametrize("dtype", [None, mx.bfloat16])
@pytest.mark.parametrize("mode", ["affine-8", "mxfp8"])
@pytest.mark.parametrize("name", ["llama-untied", "gemma2", "cohere"])
def test_embeddings_and_head_are_rounded_when_asked(name, mode, dtype):
    """Tied or not; a packed head is a function without a matrix, with the same log-probs."""
    policy, tokens = tiny_policy(name, **SIZE, head_dim=32, compute_dtype=dtype), token_rows(2, 6)
    role, dense = both_storages(policy, mode, tokens, head=True)
    head = {"lm_head.weight"} if name == "llama-untied" else set()
    assert {n for n in role.names if ".layers." not in n} == {"model.embed_tokens.weight"} | head
    params, targets = role.transform(policy.params), token_rows(2, 6, seed=5)
    norm = policy.params["model"]["norm"]["weight"].astype(dtype or mx.float32)
    assert mx.array_equal(params["model"]["norm"]["weight"], norm)
    assert dense.dtype == (dtype or mx.float32) and role.policy.head(params).weight is None
    got = g.token_logprobs(role.policy.hidden(params, tokens), role.policy.head(params), targets)
    z = role.policy.logits(params, tokens).astype(mx.float32)
    want = mx.take_along_axis(z - mx.logsumexp(z, -1, keepdims=True), targets[..., None], -1)[..., 0]
    assert float(mx.abs(got - want).max()) < (1e-4 if dtype is None else 0.1)
    plain = quantized_role(policy, mode)
    assert worst_difference(plain.policy.logits(plain.transform(policy.params), tokens), dense) > 1e-4
