"""PEFT's alpha_pattern where several patterns fit a layer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from runners.errors import UserError
from runners.models import peft_adapters
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder


@pytest.mark.parametrize("first", ["layers.0.self_attn.q_proj", "q_proj"])
def test_the_first_pattern_that_fits_decides(tmp_path, monkeypatch, first):
    """As in PEFT: W + alpha / r · B A, the later pattern only where the first one does not fit."""
    monkeypatch.chdir(tmp_path)
    base: Any = mx.load(str(make_model_folder(tmp_path / "base") / "model.safetensors"))
    patterns = {first: 3, **{name: 5 for name in ("layers.0.self_attn.q_proj", "q_proj") if name != first}}
    layers = [f"model.layers.{block}.self_attn.q_proj" for block in range(2)]
    tensors, want, rng = {}, {}, np.random.default_rng(0)
    for layer in layers:
        weight = base[f"{layer}.weight"]
        a, b = (mx.array(rng.normal(size=size)) for size in ((2, weight.shape[1]), (weight.shape[0], 2)))
        tensors |= {
            f"base_model.model.{layer}.lora_{part}.weight": leaf for part, leaf in (("A", a), ("B", b))
        }
        alpha = 3 if first in layer else 5
        want[layer] = weight.astype(mx.float32) + alpha / 2 * (b @ a)
    (tmp_path / "peft").mkdir()
    mx.save_safetensors("peft/adapter_model.safetensors", tensors)
    stated = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, "target_modules": ["q_proj"]}
    stated |= {"alpha_pattern": patterns, "base_model_name_or_path": "base"}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(stated))
    grpo("export", "peft", "--out", "fused")
    fused: Any = mx.load("fused/model.safetensors")
    for layer, weight in want.items():
        np.testing.assert_allclose(np.array(fused[f"{layer}.weight"]), np.array(weight), atol=1e-4)


def test_one_process_matches_all_patterns_until_one_takes_too_long():
    """Then it is another one."""

    def scale(pattern):
        settings = {"lora_alpha": 2, "alpha_pattern": {pattern: 8.0}}
        return peft_adapters._scales(settings, {"a" * 60 + ".q_proj": 4}, Path("adapters"))[
            "a" * 60 + ".q_proj"
        ]

    def process():
        return peft_adapters._match.start()[0].pid

    assert (scale("q_proj"), scale("k_proj")) == (2.0, 0.5)
    first = process()
    assert scale("[a-z]_proj") == 2.0 and process() == first
    with pytest.raises(UserError, match="alpha_pattern: expected regular expressions that can be matched"):
        scale("(a+)+!")
    assert scale("q_proj") == 2.0 and process() != first
