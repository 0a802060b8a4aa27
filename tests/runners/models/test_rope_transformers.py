"""Folders that transformers 5 saves have the log-probs of transformers here. Skipped without PyTorch."""

import importlib
import json
from importlib.util import find_spec

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest

from runners.config.sections import ModelConfig
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from tests.support.commands import grpo
from tests.support.tiny_models import make_tokenizer, write_tokenizer

pytestmark = [
    pytest.mark.skipif(not (find_spec("torch") and find_spec("transformers")), reason="wants PyTorch"),
    pytest.mark.filterwarnings("ignore"),  # of packages that are not ours
]

CPU = Platform(backend="cpu")
TOKENS = np.random.default_rng(0).integers(3, 319, 24).tolist()
THETA = 777.0  # nobody's default
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,  # a square, as gemma rounds its root
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
    "yarn-mscale": {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    "longrope": {"short_factor": [1.5, 2.0] * 4, "long_factor": [1.5, 2.0] * 4},
}
HEADED = {"head_dim": 16}
MODELS = {
    "llama": ("LlamaConfig", {}, tuple(KINDS)),
    "qwen2": ("Qwen2Config", {}, tuple(KINDS)),
    "qwen3": ("Qwen3Config", HEADED, tuple(KINDS)),
    "mistral": ("MistralConfig", HEADED, tuple(KINDS)),
    "phi3": ("Phi3Config", {"original_max_position_embeddings": 16}, ("default", "longrope")),
    "gemma2": ("Gemma2Config", {**HEADED, "query_pre_attn_scalar": 16}, ("default",)),
    "gemma3_text": ("Gemma3TextConfig", {**HEADED, "query_pre_attn_scalar": 16}, ("default", "linear")),
    "stablelm": ("StableLmConfig", {}, ("default",)),
    "olmo3": ("Olmo3Config", {}, ("default", "yarn")),
}


def parameters(kind, **more):
    """rope_parameters of a kind, with a θ that is no default of anything."""
    table = {"rope_type": kind.partition("-")[0], "rope_theta": THETA, **KINDS[kind], **more}
    if table["rope_type"] in ("llama3", "yarn", "longrope"):
        table["original_max_position_embeddings"] = 16
    return table


def save(folder, name, kind):
    """A model of random weights as transformers saves it, with a tokenizer; its log-probs by transformers."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    config_class, more, _ = MODELS[name]
    table = parameters(kind, **({"partial_rotary_factor": 0.25} if name == "stablelm" else {}))
    if name in ("gemma3_text", "olmo3"):
        local = {"rope_type": "default", "rope_theta": THETA if name == "olmo3" else 55.0}
        table = {"full_attention": table, "sliding_attention": local}
        kinds = ["sliding_attention", "full_attention"] * 2
        more = {**more, "layer_types": kinds, "sliding_window": 8}
    config = getattr(transformers, config_class)(**SHAPE, **more, rope_parameters=table)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder, make_tokenizer())
    stated = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in stated and "rope_theta" not in stated  # else there is nothing to test
    return by_transformers(folder)


def by_transformers(folder):
    """Log-probs of TOKENS by transformers, which opens the folder anew."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    return torch.log_softmax(logits, -1).numpy()


def by_mlx(module):
    """Log-probs of TOKENS by a module of mlx-lm's."""
    logits = module(mx.array([TOKENS]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


CASES = [(name, kind) for name, (_, _, kinds) in MODELS.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_log_probs_are_those_of_transformers(tmp_path, monkeypatch, name, kind):
    """Loaded, converted and exported; transformers itself reads what is written as it read the source."""
    monkeypatch.chdir(tmp_path)
    want = save(tmp_path / "model", name, kind)
    loaded = load_model(ModelConfig(path="model"), CPU)
    assert np.abs(by_mlx(loaded.module) - want).max() < 5e-4
    for command in (("convert", "model", "--out", "converted"), ("export", "model", "--out", "exported")):
        grpo(*command)
        written = tmp_path / ("converted" if "convert" in command else "exported")
        assert np.abs(by_mlx(mlx_lm.utils.load_model(written)[0]) - want).max() < 5e-4
        assert np.abs(by_transformers(written) - want).max() < 1e-5
