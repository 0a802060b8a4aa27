"""Folders as transformers 5 saves them, where it writes other names than mlx-lm reads."""

import json

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.architectures.small_models import small_config, small_model
from grpo_fn.trees import named_leaves
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder

TOKENS = mx.array([[5, 9, 7, 31, 12, 4]])


def test_convert_reads_what_transformers_saves(tmp_path):
    """Another name for the number of experts: mlx-lm alone opens the new folder, and computes the same."""
    source = make_model_folder(tmp_path / "source")  # for its tokenizer
    model, config = small_model("qwen3_moe"), small_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    (source / "config.json").write_text(json.dumps(config))
    weights = named_leaves(model.parameters())
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "pt"})
    grpo("convert", source, "--out", tmp_path / "out")
    module, _ = mlx_lm.utils.load_model(tmp_path / "out")
    assert mx.allclose(*(each(TOKENS, cache=make_prompt_cache(each)) for each in (module, model)))
