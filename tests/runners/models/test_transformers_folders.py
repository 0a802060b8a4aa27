"""Folders as transformers 5 saves them, where it writes other names or fewer weights than mlx-lm reads."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner
from mlx_lm.models.cache import make_prompt_cache

import grpo_fn as g
from benchmarks.architectures.small_models import small_config, small_model
from grpo_fn.trees import named_leaves
from runners import cli
from runners.errors import UserError
from runners.models.model_reader import load_module
from tests.support.tiny_models import make_model_folder

TOKENS = mx.array([[5, 9, 7, 31, 12, 4]])
UNUSED = r"layers\.[45]\.self_attn\.(k_proj|v_proj|k_norm)"  # gemma3n's last layers share those of others


def saved(folder, name, change, left_out=r"$^"):
    """The folder of a small model, its config changed and some weights left out; and the model."""
    model, config = small_model(name), small_config(name)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    weights = named_leaves(model.parameters())
    kept = {path: leaf for path, leaf in weights.items() if not re.search(left_out, path)}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, metadata={"format": "pt"})
    return model, len(weights) - len(kept)


def test_keys_that_layers_share_are_saved_once(tmp_path):
    """gemma3n without the weights that its last layers do not use: it computes what the whole model does."""
    model, count = saved(tmp_path, "gemma3n", lambda config: None, UNUSED)
    assert count == 6
    module, _ = load_module(tmp_path, False)
    assert mx.allclose(*(each(TOKENS, cache=make_prompt_cache(each)) for each in (module, model)))
    found, wanted = (g.Policy.from_module(each) for each in (module, model))
    assert g.check_policy(found, found.params, [[5, 9, 7], [3]]).given_up == ()
    assert mx.allclose(found.logits(found.params, TOKENS), wanted.logits(wanted.params, TOKENS))


@pytest.mark.parametrize(
    ("name", "change", "left_out"),
    [
        ("qwen3_moe", lambda config: config.update(num_local_experts=config.pop("num_experts")), r"$^"),
        ("gemma3n", lambda config: None, UNUSED),
    ],
)
def test_convert_reads_what_transformers_saves(tmp_path, name, change, left_out):
    """Another name for the number of experts, keys that are saved once: mlx-lm alone opens the new folder,
    and computes what the whole model does."""
    source = make_model_folder(tmp_path / "source")  # for its tokenizer
    model, _ = saved(source, name, change, left_out)
    done = CliRunner().invoke(cli.main, ["convert", str(source), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    module, _ = mlx_lm.utils.load_model(tmp_path / "out")
    assert mx.allclose(*(each(TOKENS, cache=make_prompt_cache(each)) for each in (module, model)))


@pytest.mark.parametrize("left_out", [r"layers\.1\.self_attn\.k_proj", r"layers\.5\.self_attn\.q_proj"])
def test_other_weights_have_to_be_there(tmp_path, left_out):
    saved(tmp_path, "gemma3n", lambda config: None, left_out)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_module(tmp_path, False)
