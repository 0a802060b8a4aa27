"""Packs weights for `grpo convert` and `grpo export`, with rounding to nearest by mlx-lm or
calibrated on prompts.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn

import grpo_fn as g
from grpo_fn.policy import Moments, QuantMode, added, carries_of, input_moments, round_calibrated
from grpo_fn.trees import named_leaves
from runners.data.messages import read_prompts
from runners.data.rendering import render
from runners.errors import UserError, user_errors
from runners.models.model_reader import cast_floating

GROUP = 64  # default group size of affine quantization, here and in mlx-lm
PROMPTS = 64  # at most, from the file
TOKENS = 128  # per completion
ROWS = 8  # completions at a time
Collect = Callable[[nn.Module, int], Moments]


@attrs.frozen(kw_only=True)
class QuantizationOptions:
    """The options for packing weights. Without options, weights are not packed."""

    mode: str = ""  # "affine", "mxfp4", "nvfp4", "mxfp8"
    bits: int | None = None  # of "affine"
    group_size: int | None = None
    recipe: str = ""  # one of mlx-lm's mixed ones

    @property
    def wanted(self) -> bool:
        """Whether any option requires packing."""
        return bool(self.mode or self.recipe or self.bits)

    @property
    def affine(self) -> bool:
        """Whether the weights use the mode that supports calibration and recipes."""
        return self.wanted and self.mode in ("", "affine")

    def __attrs_post_init__(self) -> None:
        """Raises UserError for incompatible options."""
        if self.group_size and not self.wanted:
            raise UserError("--group-size requires --bits, --mode or --recipe")
        if self.recipe and (self.bits or not self.affine):
            raise UserError("--recipe sets the bits of affine quantization; omit --bits and --mode")


NOT_PACKED = QuantizationOptions()


def moments_from(file: str, column: str, tokenizer: Any, note: Callable[[str], None]) -> Collect:
    """Returns a function (module, group size) -> moments of the module's linear layers, computed on
    a file's prompts and their completions.

    The model itself samples the completions, with a fixed key. Raises the errors of `read_prompts`.
    """
    rows = read_prompts(file, column, option="--calibrate")
    prompts = [render(tokenizer, messages)[1] for messages in rows[:PROMPTS]]
    sampling = g.Sampling(max_new_tokens=TOKENS, eos_ids=frozenset(tokenizer.eos_token_ids))

    def collect(module: nn.Module, group_size: int) -> Moments:
        policy = g.Policy.for_inference(module)
        moments = {}
        names = [
            f"{path}.weight"
            for path, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and layer.weight.shape[-1] % group_size == 0
        ]
        if not names:
            return {}
        for start in range(0, len(prompts), ROWS):
            some = prompts[start : start + ROWS]
            note(f"calibrating: prompts {start + 1} to {start + len(some)} of {len(prompts)}")
            rollout = g.generate(policy, {}, some, sampling, key=mx.random.key(start))
            batch = g.make_batch(rollout, mx.zeros((len(some), 1)))
            lengths_b = batch.prompt_lengths_b + rollout.lengths_b
            moments = added(
                moments, input_moments(policy, {}, batch.tokens_bl, lengths_b, names, group_size)
            )
        return moments

    return collect


def repack(
    module: nn.Module,
    config: dict[str, Any],
    quantization: QuantizationOptions,
    dtype: str = "",
    dequantize: bool = False,
    collect: Collect | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Casts, unpacks and packs the module in place with mlx-lm, and returns its new config.json.

    Weights that mlx-lm's module keeps in their own dtype are not cast. With `collect`, linear
    layers are rounded using the moments that it returns. Raises UserError if the recipe does not
    fit the model, or if nothing could be packed, because mlx-lm silently skips layers whose width
    is not a multiple of the group size.
    """
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import dequantize_model, quantize_model

    if dtype:
        may_cast = getattr(module, "cast_predicate", lambda name: True)
        leaves = {
            name: x for name, x in named_leaves(module.parameters()).items() if may_cast(name)
        }
        cast_floating(module, getattr(mx, dtype), leaves)
        config = config | {key: dtype for key in ("torch_dtype", "dtype") if key in config}
    if dequantize:
        module = dequantize_model(module)
        packing = ("quantization", "quantization_config")
        config = {key: value for key, value in config.items() if key not in packing}
    if not quantization.wanted:
        return module, config
    predicate: Any = None  # mlx-lm's two functions disagree on its type
    group_size = quantization.group_size or GROUP
    if quantization.recipe:
        with user_errors(f"--recipe {quantization.recipe}", ValueError):
            predicate = mixed_quant_predicate_builder(quantization.recipe, module, group_size)
    before = _packed(module)
    moments = collect(module, group_size) if collect else {}
    weights = {
        name: leaf for name, leaf in named_leaves(module.parameters()).items() if name in moments
    }
    # stdout is for a command's results, but mlx-lm reports its progress there.
    with (
        contextlib.redirect_stdout(sys.stderr),
        # bits or a group size that the mode does not support
        user_errors("the weights cannot be quantized", ValueError),
    ):
        module, config = quantize_model(
            module,
            config,
            quantization.group_size,
            quantization.bits,
            mode=quantization.mode or "affine",
            quant_predicate=predicate,
        )
    if _packed(module) == before:
        fault = "no layer's width is a multiple of the group"
        raise UserError(
            f"nothing was quantized: {'the weights are already quantized' if before else fault}"
        )
    carries = carries_of(moments)
    for path, layer in module.named_modules():  # again, from the full weights
        name = f"{path}.weight"
        if name in moments and hasattr(layer, "bits"):
            form = QuantMode(layer.mode, layer.bits, layer.group_size)
            layer.update(round_calibrated({name: weights[name]}, carries, form)[name])
    return module, config


def _packed(module: nn.Module) -> int:
    return sum(hasattr(layer, "bits") for _, layer in module.named_modules())
