"""Tiny vision-language models with random weights, and pictures: needs mlx-vlm (the extra `vlm`)."""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import AddedToken

from grpo_fn.trees import named_leaves
from tests.support.tiny_models import make_tokenizer, write_tokenizer

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_TOKEN = 322
VISION_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
needs_mlx_vlm = pytest.mark.skipif(not find_spec("mlx_vlm"), reason="wants mlx-vlm: the extra `vlm`")


def without_mlx_vlm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed, whatever was imported before."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    for name in [name for name in sys.modules if name.startswith("mlx_vlm.")]:
        monkeypatch.delitem(sys.modules, name)


def vision_settings(family: str = "qwen2_vl") -> dict[str, Any]:
    """config.json of a tiny model, in the form of the models on the Hub: text keys at the root."""
    text = dict(
        model_type=family, vocab_size=324, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6,
        rope_theta=10000.0, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    ids = dict(zip(("vision_start", "vision_end", "image", "video"), range(320, 324), strict=True))
    vision = dict(
        model_type=family, depth=2, num_heads=2, in_channels=3, patch_size=4, spatial_patch_size=4,
        spatial_merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        wide = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
        vision |= {**wide, "window_size": 16, "fullatt_block_indexes": [1]}
    return text | {f"{name}_token_id": i for name, i in ids.items()} | {"vision_config": vision}


def make_vision_folder(folder: Path, family: str = "qwen2_vl", *, seed: int = 0) -> Path:
    """Writes a folder of random float32 weights that mlx-vlm loads, and returns it."""
    kind: Any = importlib.import_module(f"mlx_vlm.models.{family}")
    settings = vision_settings(family)
    config = kind.ModelConfig.from_dict(json.loads(json.dumps(settings)))
    config.text_config = kind.TextConfig.from_dict(config.text_config)
    config.vision_config = kind.VisionConfig.from_dict(config.vision_config)
    module = kind.Model(config)
    folder.mkdir(parents=True)
    key = mx.random.key(seed)
    weights = {}
    for name, leaf in named_leaves(module.parameters()).items():
        key, own = mx.random.split(key)
        weights[name] = 0.25 * mx.random.normal(leaf.shape, key=own)
        if "norm" in name or "ln_q" in name:
            weights[name] = weights[name] + (1.0 if name.endswith("weight") else 0.0)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(settings))
    write_processor(folder, family)
    return folder


def write_processor(folder: Path, family: str = "qwen2_vl") -> None:
    """Writes the tokenizer, the chat template and the image processor into a model's folder."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE_TOKEN
    write_tokenizer(folder, tokenizer)
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(stated | {"chat_template": VISION_TEMPLATE}))
    pictures = dict(
        image_processor_type="Qwen2VLImageProcessor",
        processor_class="Qwen2VLProcessor" if family == "qwen2_vl" else "Qwen2_5_VLProcessor",
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))


def write_picture(file: Path, rows: int, columns: int, *, seed: int = 0) -> Path:
    """A picture of noise."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)
    Image.fromarray(noise).save(file)
    return file
