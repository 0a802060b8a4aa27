"""rope_parameters from transformers 5 are translated to the keys that mlx-lm's modules read."""

import importlib
import json
import pkgutil
from dataclasses import fields, is_dataclass

import mlx.core as mx
import mlx_lm.models
import mlx_lm.utils
import pytest
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.architectures.small_models import small_config, small_model
from grpo_fn.trees import named_leaves
from runners.config.sections import ModelConfig
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.models import rope_keys
from runners.models.loaded_model import load_model
from runners.models.model_writer import save_model
from runners.models.rope_keys import with_rope_keys
from tests.support.commands import grpo
from tests.support.damage import stating
from tests.support.tiny_models import make_model_folder

CPU = Platform(backend="cpu")
TOKENS = mx.array([[5, 9, 70, 31, 12, 40, 41, 42, 43, 44, 45, 46]])
LENGTHS = {"max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LAYERS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
}


def config(model_type, rope_parameters, **more):
    """The keys of a config.json that concern the rotary embedding."""
    return {"model_type": model_type, **LENGTHS, **more, "rope_parameters": rope_parameters}


def added(before):
    """The added keys. Existing keys are kept, and a second translation changes nothing."""
    after = with_rope_keys(before)
    assert after.items() >= before.items() and with_rope_keys(after) == after
    return {key: value for key, value in after.items() if key not in before}


def scaling(table, **changes):
    """rope_scaling for a table, with both names of its type, without θ and the rotated share."""
    kept = {k: v for k, v in table.items() if k not in ("rope_theta", "partial_rotary_factor")}
    return {**kept, "type": table["rope_type"], **changes}


KEYS = [
    (config("qwen3", {"rope_theta": 1e6, "rope_type": "default"}), {"rope_theta": 1e6}),
    (
        config("qwen2", {"type": "linear", "rope_theta": 1e6, "factor": 4}),
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
    ),
    (config("llama", LLAMA3), {"rope_theta": 5e5, "rope_scaling": scaling(LLAMA3)}),
    (config("qwen2", YARN), {"rope_theta": 1e6, "rope_scaling": scaling(YARN)}),
    (
        config("phi3", {**LONG, "partial_rotary_factor": 0.5}),
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16,
         "rope_scaling": scaling(LONG)},
    ),
    (
        config("phi3", {k: v for k, v in LONG.items() if k != "original_max_position_embeddings"},
               original_max_position_embeddings=16),
        {"rope_theta": 1e4, "rope_scaling": scaling(LONG)},
    ),
    (
        config("gpt_neox", {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}),
        {"rotary_emb_base": 1e4, "rotary_pct": 0.25},
    ),
    (
        config("minimax_m2", {"rope_theta": 5e6, "partial_rotary_factor": 0.5}, head_dim=128),
        {"rope_theta": 5e6, "rotary_dim": 64},
    ),
    (
        config("glm4_moe", {"rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    (  # transformers states 6, its default, whatever the layers are
        config("gemma3_text", LAYERS, layer_types=["sliding_attention", "full_attention"] * 3,
               _sliding_window_pattern=6),
        {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "sliding_window_pattern": 2,
         "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0}},
    ),
    (
        config("olmo3", {kind: {"rope_type": "default", "rope_theta": 5e5} for kind in LAYERS}),
        {"rope_theta": 5e5},
    ),
    (config("llama", {"rope_type": "default", "rope_theta": 5e5}, rope_scaling=None), {"rope_theta": 5e5}),
]  # fmt: skip


@pytest.mark.parametrize(("before", "want"), KEYS)
def test_the_keys_of_each_kind(before, want):
    """mlx-lm's module finds θ, scaling, the rotated share and tables by layer type."""
    assert added(before) == want


def test_nothing_to_map_changes_nothing():
    """No rope_parameters, a module that reads them, custom code, or an unknown module."""
    table = {"rope_type": "default", "rope_theta": 5e5}
    for before in (
        {"model_type": "llama", "rope_theta": 1e4},
        config("llama", None),
        config("ministral3", {**YARN, "llama_4_scaling_beta": 0.1}),
        config("gemma4_text", LAYERS),
        config("llama", table, model_file="own.py"),
        config("nobody", table),
        config(7, table),
        config("mistral3", None, text_config={"model_type": "ministral3", "rope_parameters": YARN}),
    ):
        assert with_rope_keys(before) is before


REFUSED = [
    (config("gemma2", YARN), 'gemma2 does not support rope_type = "yarn"'),
    (config("mixtral", {"rope_type": "linear", "factor": 2.0}), 'mixtral does not support rope_type = "l'),
    (config("deepseek_v2", {"rope_theta": 1e4}), 'deepseek_v2 does not support rope_type = "default"'),
    (config("llama", {"rope_type": "axial"}), 'llama does not support rope_type = "axial"'),
    (config("llama", {"partial_rotary_factor": 0.5}), "does not support partial_rotary_factor = 0.5"),
    (config("llama", {**YARN, "truncate": False}), "support truncate with rope_type yarn = false"),
    (config("llama", {**YARN, "attention_factor": 2.0}), "attention_factor with rope_type yarn = 2.0"),
    (config("llama", {**YARN, "mscale": 0.7}), "does not support mscale with rope_type yarn = 0.7"),
    (config("llama", {**LONG, "attention_factor": 3.0}), "attention_factor with rope_type longrope = 3.0"),
    (config("llama", LAYERS), "different parameters for sliding_attention and full_attention"),
    (config("gemma3_text", {"sliding_attention": YARN}), "different parameters for sliding_attention"),
    (config("gemma3_text", {"compressed": YARN}), "does not support layers of type compressed"),
    (
        config("gemma3_text", LAYERS, layer_types=["full_attention", "sliding_attention"]),
        "layer_types other than full_attention in every n-th layer",
    ),
    (config("llama", {"rope_type": "linear"}), "format that transformers writes: KeyError: 'factor'"),
    (config("llama", {"rope_type": ["linear"]}), "rope_parameters: expected the format"),
    (config("llama", {**YARN, "factor": "x"}), "rope_parameters: expected the format"),
]


@pytest.mark.parametrize(("before", "line"), REFUSED)
def test_settings_that_mlx_lm_does_not_support_are_refused(before, line):
    """The error names the key in one line, instead of using a default."""
    with pytest.raises(UserError, match=line) as caught:
        with_rope_keys(before)
    assert "\n" not in str(caught.value)


def modules():
    """The name of each of mlx-lm's modules and the keys that it reads."""
    for found in pkgutil.iter_modules(mlx_lm.models.__path__):
        if found.name == "olmo":  # ends the process where a package of its own is missing
            continue
        module = importlib.import_module(f"mlx_lm.models.{found.name}")
        kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)]
        arguments = getattr(module, "ModelArgs", None)
        if arguments is None or not is_dataclass(arguments):
            continue
        own = {field.name for kind in kinds if kind.__module__ == module.__name__ for field in fields(kind)}
        yield found.name, own | {field.name for field in fields(arguments)}


def test_every_module_of_mlx_lm_is_accounted_for():
    """Modules that read rope_parameters or have a text_config are listed."""
    found = dict(modules())
    assert len(found) > 90
    themselves = {"gemma4", "kimi_k3", "minimax_m3_vl", "muse_spark", "qwen3_5", "qwen3_5_moe"}
    themselves.add("prism_hadamard_qwen35")
    for name, keys in found.items():
        if "rope_parameters" in keys and name not in rope_keys._READ_IT:
            assert "rope_theta" in keys, f"{name} reads rope_parameters: is it to be left alone?"
        if "text_config" in keys and name not in rope_keys._TEXT:
            assert name in themselves, f"{name}: where are its text's keys read?"
    named = {*rope_keys._OTHER_TYPES, *rope_keys._READ_IT, *rope_keys._TEXT}
    assert named <= found.keys()


def logits(folder):
    """A folder's logits, computed by mlx-lm alone."""
    return mlx_lm.utils.load_model(folder)[0](TOKENS)


def test_both_spellings_compute_the_same(tmp_path, monkeypatch):
    """Both have the same logits, and mlx-lm alone reads the folders of training, `convert` and `export`."""
    monkeypatch.chdir(tmp_path)
    old, new = make_model_folder(tmp_path / "old"), make_model_folder(tmp_path / "new")
    stating("config.json", rope_theta=777.0, rope_scaling=scaling(LLAMA3), **LENGTHS)(old)
    stated = json.loads((new / "config.json").read_text()) | {
        "rope_parameters": LLAMA3 | {"rope_theta": 777.0}
    }
    del stated["rope_theta"]
    (new / "config.json").write_text(json.dumps(stated | LENGTHS))
    want = logits(old)
    assert not mx.allclose(logits(new), want, atol=1e-3)  # mlx-lm alone takes defaults
    loaded = load_model(ModelConfig(path=str(new)), CPU)
    assert mx.allclose(loaded.module(TOKENS), want, atol=1e-5) and loaded.config["rope_theta"] == 777.0
    save_model(tmp_path / "saved", loaded.module.parameters(), loaded)
    for command in (("convert", "new", "--out", "converted"), ("export", "new", "--out", "exported")):
        grpo(*command)
    for name in ("saved", "converted", "exported"):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["rope_parameters"] == LLAMA3 | {"rope_theta": 777.0}
        assert mx.allclose(logits(tmp_path / name), want, atol=1e-5), name
    assert json.loads((new / "config.json").read_text()) == stated | LENGTHS


def test_convert_reads_what_transformers_saves(tmp_path):
    """transformers names the number of experts differently; mlx-lm alone opens the converted folder."""
    source = make_model_folder(tmp_path / "source")  # for its tokenizer
    model, config = small_model("qwen3_moe"), small_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    (source / "config.json").write_text(json.dumps(config))
    weights = named_leaves(model.parameters())
    mx.save_safetensors(str(source / "model.safetensors"), weights, metadata={"format": "pt"})
    grpo("convert", source, "--out", tmp_path / "out")
    module, _ = mlx_lm.utils.load_model(tmp_path / "out")
    assert mx.allclose(*(each(TOKENS[:, :4], cache=make_prompt_cache(each)) for each in (module, model)))
