"""Calibrated rounding: moments, carried errors, packed codes, and its gain over rounding to nearest."""

import attrs
import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from benchmarks.architectures.small_models import small_model
from grpo_fn.backends.mechanisms import disabled, has_cuda
from grpo_fn.policy import calibration
from grpo_fn.policy.calibration import (
    block_width,
    carries_of,
    folded,
    input_moments,
    pack_codes,
    round_calibrated,
)
from grpo_fn.policy.layers.quantized_layers import QuantMode, dequantize, quantize
from grpo_fn.policy.quantized_role import quantized_role
from grpo_fn.trees import named_leaves
from tests.support.tiny_policies import lora_policy, tiny_policy, token_rows

SIZE = {"hidden_size": 64, "intermediate_size": 128}
LENGTHS = mx.array([8, 5, 3])


def skewed_inputs(columns, rows=512):
    """Correlated inputs with large and small channels, as in a trained model."""
    mixing = mx.random.normal((columns, columns), key=mx.random.key(1)) * (mx.arange(columns) % 7 + 0.1)
    return mx.random.normal((rows, columns), key=mx.random.key(2)) @ mixing / columns**0.5


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_codes_are_packed_as_mlx_packs_them(bits):
    """Packing mlx's own codes again gives mlx's words."""
    mode = QuantMode("affine", bits, 32)
    packed = quantize(mx.random.normal((8, 96), key=mx.random.key(0)), mode)
    values = dequantize(packed, mode, mx.float32).reshape(8, 3, 32)
    codes = mx.round((values - packed["biases"][..., None]) / packed["scales"][..., None])
    assert mx.array_equal(pack_codes(codes.reshape(8, 96), bits), packed["weight"])


@pytest.mark.skipif(not has_cuda(), reason="needs CUDA")
@pytest.mark.parametrize(
    ("bits", "out", "columns", "group"), [(3, 300, 576, 64), (4, 64, 96, 32), (8, 7, 3072, 128)]
)
def test_the_kernel_rounds_as_the_composed_form(bits, out, columns, group):
    """Equal codes except for ties and the rest of their rows."""
    width = block_width(columns, group)
    xs = [skewed_inputs(columns, rows=2048)[:, at : at + width] for at in range(0, columns, width)]
    moments = {name: mx.stack([x.T @ x for x in xs]) for name in "vw"}
    weights = {name: mx.random.normal((out, columns), key=mx.random.key(ord(name))) for name in "vw"}
    given = weights, carries_of(moments), QuantMode("affine", bits, group)
    with disabled("round_columns", "group_ranges"):
        want = round_calibrated(*given)["w"]
    found = round_calibrated(*given)["w"]
    assert (found["scales"] == want["scales"]).mean().item() > 0.99
    assert (found["weight"] == want["weight"]).mean().item() > 0.9


def rounded_slowly(weight, moments, scales, biases, bits, group):
    """GPTQ of one block in float64 with given scales, column by column, largest inputs first."""
    diagonal = np.diag(moments)
    order = np.argsort(-diagonal, kind="stable")
    damped = moments + np.diag(calibration.DAMPING * diagonal + 1e-6 * diagonal.mean())
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)].astype(np.float64))).T
    weight, out = weight.astype(np.float64).copy(), np.zeros_like(weight)
    for k, column in enumerate(order):
        scale, bias = scales[:, column // group], biases[:, column // group]
        out[:, column] = np.clip(np.round((weight[:, column] - bias) / scale), 0, 2**bits - 1) * scale + bias
        share = mx.array(upper[k, k + 1 :] / upper[k, k], mx.float32).astype(mx.bfloat16)
        weight[:, order[k + 1 :]] -= np.outer(weight[:, column] - out[:, column], share.astype(mx.float32))
    return out


@pytest.mark.parametrize(("columns", "group"), [(64, 32), (192, 64), (160, 32)])
def test_errors_are_carried_on_column_by_column(columns, group):
    """The halving recursion equals the loop over columns, except for a few ties."""
    mode, x = QuantMode("affine", 4, group), skewed_inputs(columns)
    weight, moments = mx.random.normal((24, columns), key=mx.random.key(3)), x.T @ x
    packed = round_calibrated({"w": weight}, carries_of({"w": moments[None]}), mode)["w"]
    scales, biases = np.array(packed["scales"]), np.array(packed["biases"])
    want = rounded_slowly(np.array(weight), np.array(moments), scales, biases, 4, group)
    found = np.array(dequantize(packed, mode, mx.float32))
    assert (np.abs(found - want) < 1e-4).all(axis=1).mean() > 0.8  # a row differs from its first tie on


@pytest.mark.parametrize("bits", [3, 4, 6])
def test_outputs_are_nearer_than_with_rounding_to_nearest(bits):
    """On its calibration inputs; several layers at once give the same codes."""
    mode, x = QuantMode("affine", bits, 64), skewed_inputs(192)
    weights = {str(n): mx.random.normal((32, 192), key=mx.random.key(n)) for n in range(3)}
    carries = carries_of(dict.fromkeys(weights, (x.T @ x)[None]))
    found = round_calibrated(weights, carries, mode)
    for name, weight in weights.items():
        alone = round_calibrated({name: weight}, carries, mode)[name]
        assert all(mx.array_equal(alone[part], found[name][part]) for part in alone)

        def error(packed, weight=weight):
            return mx.square((dequantize(packed, mode, mx.float32) - weight) @ x.T).mean().item()

        assert error(found[name]) < 0.6 * error(quantize(weight, mode))


def test_blocks_divide_the_columns_in_whole_groups():
    """Blocks are as wide as `WIDTH` allows."""
    found = [block_width(columns, 64) for columns in (64, 512, 576, 1536, 11008, 4864)]
    assert found == [64, 512, 576, 1536, 256, 1216]


@pytest.mark.parametrize("columns", [32, 192])
def test_moments_are_kept_as_triangles(columns):
    """Half the numbers, the same carries, and shared moments once."""
    x = skewed_inputs(columns)
    product = x.T @ x
    whole = dict.fromkeys(("w", "v"), mx.stack([product + product.T, mx.eye(columns)]))
    half = folded(whole)
    assert half["w"] is half["v"] and half["w"].shape == (2, columns // 2, columns + 1)
    for first, second in zip(*(attrs.astuple(carries_of(m)["w"][0]) for m in (whole, half)), strict=True):
        assert mx.array_equal(first, second)


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_layers_are_factored_side_by_side(blocks, monkeypatch):
    """To the bit as alone, in parts of an eighth of the blocks, at any scale of inputs."""
    products = [
        mx.stack([x.T @ x * k for k in range(1, 17)]) for x in (skewed_inputs(64), 1e3 * skewed_inputs(64))
    ]
    moments = dict(zip("vw", products, strict=True))
    sizes = []
    factored = calibration._carry_of

    def noted(moments_nww):
        sizes.append(moments_nww.shape[0])
        return factored(moments_nww)

    monkeypatch.setattr(calibration, "_carry_of", noted)
    monkeypatch.setattr(calibration, "PART", blocks * 64**2)
    together = carries_of(moments)
    assert sizes == {1: 32 * [1], 2: 16 * [2], 100: 8 * [4]}[blocks]
    assert [together[name][1] for name in "vw"] == [0, 16]
    for name, moment in moments.items():
        alone = attrs.astuple(carries_of({name: moment})[name][0])
        first = together[name][1]
        for one, all_of_them in zip(alone, attrs.astuple(together[name][0]), strict=True):
            assert mx.array_equal(one, all_of_them[first : first + 16])


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_moments_are_those_of_the_inputs_without_padding(tune):
    """Σ x xᵀ of the counted tokens; rows add up, and q, k and v share theirs."""
    policy = (lora_policy if tune == "lora" else tiny_policy)("llama-untied", **SIZE)
    names = quantized_role(policy, "affine-4").names
    tokens = token_rows(3, 8)
    padded = mx.where(mx.arange(8)[None] < LENGTHS[:, None], tokens, 1)
    found, again = (
        input_moments(policy, policy.params, rows, LENGTHS, names, 64) for rows in (tokens, padded)
    )
    assert found.keys() == set(names)
    rows = [
        input_moments(policy, policy.params, tokens[row : row + 1, :length], mx.array([length]), names, 64)
        for row, length in enumerate(LENGTHS.tolist())
    ]
    for name in names:
        assert mx.allclose(found[name], again[name], rtol=1e-5, atol=1e-6)
        assert mx.allclose(found[name], sum(row[name] for row in rows), rtol=1e-3, atol=1e-2)
    first = policy.module.model.layers[0]
    with policy.bound(policy.params):
        x = mx.concatenate(
            [
                first.input_layernorm(policy.module.model.embed_tokens(tokens[row, :length]))
                for row, length in enumerate(LENGTHS.tolist())
            ]
        )
    query = next(name for name in names if "layers.0.self_attn.q_proj" in name)
    assert mx.allclose(found[query][0], x.T @ x, rtol=1e-3, atol=1e-2)
    assert found[query] is next(found[name] for name in names if "layers.0.self_attn.v_proj" in name)
    assert type(first.mlp).__name__ == "MLP" and "call" not in vars(type(first.self_attn.o_proj))


@pytest.mark.parametrize("tune", ["full", "lora"])
@pytest.mark.parametrize("storage", ["packed", "dequantized"])
def test_a_calibrated_role_is_nearer_to_the_model(tune, storage):
    """Nearer to the logits than rounding to nearest, in both storages and with `remade`."""
    policy = (lora_policy if tune == "lora" else tiny_policy)("llama-untied", **SIZE)
    tokens = token_rows(32, 12)
    nearest = quantized_role(policy, "affine-3", storage)
    moments = input_moments(policy, policy.params, tokens, mx.full((32,), 12), nearest.names, 64)
    full = policy.logits(policy.params, tokens)

    def logits(role):
        return role.policy.logits(role.transform(policy.params), tokens)

    calibrated = quantized_role(policy, "affine-3", storage, moments=moments)
    found = logits(calibrated)
    assert mx.linalg.norm(found - full) < 0.8 * mx.linalg.norm(logits(nearest) - full)
    assert mx.array_equal(found, logits(nearest.remade("affine-3", moments)))
    other = quantized_role(policy, "affine-3", "dequantized", moments=moments)
    assert mx.allclose(found, logits(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_experts_are_rounded_to_nearest(model):
    """Experts have no moments; the layers around them have."""
    policy = g.Policy.from_module(small_model(model))
    nearest = quantized_role(policy, "affine-4", group_size=32)
    tokens = token_rows(8, 12)
    moments = input_moments(policy, policy.params, tokens, mx.full((8,), 12), nearest.names, 32)
    assert moments and not any("switch_mlp" in name or "experts" in name for name in moments)
    made = nearest.remade("affine-4", moments).transform(policy.params)
    made, plain = named_leaves(made), named_leaves(nearest.transform(policy.params))
    assert {name for name in made if not mx.array_equal(made[name], plain[name])} == moments.keys()


def test_some_weights_may_have_more_bits():
    """The weights in `formats` have those bits, calibrated or not; the others the role's."""
    policy = tiny_policy("llama-untied", **SIZE)
    role = quantized_role(policy, "affine-4", "packed")
    wide = {name: "affine-6" for name in role.names if "down_proj" in name}
    moments = input_moments(policy, policy.params, token_rows(2, 8), mx.array([8, 8]), role.names, 64)
    for mixed in (role.remade("affine-4", None, wide), role.remade("affine-4", moments, wide)):
        assert {name for name, mode in mixed.modes.items() if mode.bits == 6} == wide.keys()
        leaves = named_leaves(mixed.transform(policy.params))
        for name in role.names:
            rows = dict(named_leaves(policy.params))[name].shape[-1]
            assert leaves[name].shape[-1] == rows * (6 if name in wide else 4) // 32
        g.materialize(mixed.policy.logits(mixed.transform(policy.params), token_rows(1, 4)))


def test_formats_with_own_scales_are_refused():
    """Their scales are powers of two or 8-bit floats, which are not calibrated."""
    policy = tiny_policy("llama-untied", **SIZE)
    with pytest.raises(ValueError, match="only affine formats; found mxfp4"):
        quantized_role(policy, "mxfp4", moments={})
