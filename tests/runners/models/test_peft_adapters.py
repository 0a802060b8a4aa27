"""PEFT's adapters: there and back, by their formula, with PEFT itself, and broken ones."""

import json
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import UserError
from runners.models.adapters import read_folder
from runners.models.peft_adapters import from_peft, to_peft
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, ran, small, train

TOKENS = [[5, 9, 70, 31, 12]]
Q, EMBEDDING = "model.layers.{}.self_attn.q_proj", "model.embed_tokens"


def array(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@given(
    rank=st.integers(1, 5),
    scale=st.sampled_from([0.5, 2.0, 20.0]),
    blocks=st.sets(st.integers(0, 3), min_size=1),
    dora=st.booleans(),
    embeds=st.booleans(),
    outer=st.sampled_from(["", "language_model."]),
)
def test_adapters_go_there_and_back(rank, scale, blocks, dora, embeds, outer):
    """mlx-lm's -> PEFT's -> mlx-lm's: every bit, for any choice of blocks and parts."""
    layers = [outer + Q.format(block) for block in blocks] + ([outer + EMBEDDING] if embeds else [])
    tensors = {}
    for layer in layers:
        tensors |= {f"{layer}.lora_a": array(6, rank), f"{layer}.lora_b": array(rank, 4, seed=1)}
        tensors |= {f"{layer}.m": array(4, seed=2)} if dora else {}
    kind = "dora" if dora else "lora"
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    settings = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, "model": "a/b"}
    config, theirs = to_peft(settings, tensors)
    back, found = from_peft(config, theirs, Path())
    assert back == settings | {"lora_parameters": parameters | {"keys": sorted(layers)}}
    assert found.keys() == tensors.keys()
    assert all(mx.array_equal(found[name], tensors[name]) for name in tensors)
    names = {"q_proj", *(["embed_tokens"] if embeds else [])}
    assert (set(config["target_modules"]) == names) == (0 in blocks)


@given(
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    alpha=st.floats(0.5, 32),
    other=st.none() | st.floats(0.5, 32),
    root=st.booleans(),
)
def test_every_scale_and_rank_is_pefts(ranks, alpha, other, root):
    """alpha / r or alpha / √r, with patterns of rank and alpha: each layer's update as PEFT adds it."""
    settings = {"peft_type": "LORA", "lora_alpha": alpha, "use_rslora": root, "r": ranks[0]}
    settings |= {"alpha_pattern": {r"^model\.layers.1.self_attn.q_proj": other}} if other else {}
    theirs, want = {}, {}
    for block, rank in enumerate(ranks):
        a, b = array(rank, 6, seed=block), array(4, rank, seed=block + 9)
        layer = Q.format(block)
        theirs |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        own = other if other and block == 1 else alpha
        want[layer] = own / (rank**0.5 if root else rank) * (b @ a)
    stated, found = from_peft(settings, theirs, Path())
    assert stated["lora_parameters"]["rank"] == max(ranks)
    for layer, update in want.items():
        ours = stated["lora_parameters"]["scale"] * (found[f"{layer}.lora_a"] @ found[f"{layer}.lora_b"]).T
        assert np.allclose(np.array(ours), np.array(update), rtol=1e-4, atol=1e-4)


A, B = f"base_model.model.{Q.format(0)}.lora_A.weight", f"base_model.model.{Q.format(0)}.lora_B.weight"


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type: expected LORA"),
        ({"lora_alpha": float("inf")}, {}, "lora_alpha: expected a number"),
        ({"bias": "all"}, {}, "bias: expected none"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: expected none"),
        ({"fan_in_fan_out": True, "lora_bias": True}, {}, "fan_in_fan_out: expected none"),
        ({"alpha_pattern": {"(a+)+$": 2}}, {}, "alpha_pattern: expected names of layers"),
        ({"alpha_pattern": {"q": "2"}}, {}, "alpha_pattern: expected a JSON object of numbers"),
        ({}, {"../../x": array(2, 2)}, "is no part of a LoRA"),
        ({}, {B: array(4, 2)}, "expected lora_A and lora_B of one rank"),
        ({}, {A: array(3, 6)}, "expected lora_A and lora_B of one rank"),
        ({}, {A: array(2, 6, 1)}, "is no part of a LoRA"),
        ({}, {A: mx.zeros((0, 6)), B: mx.zeros((4, 0))}, "a rank from 1 on, found 0"),
        ({}, None, "found none"),
    ],
)
def test_what_mlx_lm_does_not_have_is_a_line(tmp_path, settings, tensors, message):
    """Before any model is read, through the folder."""
    stated = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, "base_model_name_or_path": "a/b"} | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    whole = {A: array(2, 6), B: array(4, 2)} | (tensors or {})
    whole = {B: whole[B]} if tensors and tensors.keys() == {B} else whole
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), {} if tensors is None else whole)
    with pytest.raises(UserError, match=message):
        read_folder(tmp_path)


def test_a_hundred_thousand_patterns_take_no_time():
    """The first that fits counts; each is looked at once, however many layers there are."""
    patterns = {f"other{n}.q_proj": 2.0 for n in range(100_000)} | {"1.self_attn.q_proj": 8.0, "q_proj": 6.0}
    settings = {"peft_type": "LORA", "lora_alpha": 4.0, "r": 2, "alpha_pattern": patterns}
    theirs = {}
    for block in range(200):
        name = f"base_model.model.{Q.format(block)}"
        theirs |= {f"{name}.lora_A.weight": array(2, 6), f"{name}.lora_B.weight": array(4, 2)}
    began = time.process_time()
    stated, found = from_peft(settings, theirs, Path())
    assert time.process_time() - began < 5
    assert stated["lora_parameters"]["scale"] == 3.0
    b = [np.array(found[f"{Q.format(block)}.lora_b"]) for block in (0, 1)]
    assert np.allclose(b[1], b[0] * 8 / 6)


def test_experts_have_no_form_in_peft():
    """They are three-dimensional."""
    settings = {"lora_parameters": {"rank": 2, "scale": 1.0}}
    with pytest.raises(UserError, match="experts"):
        to_peft(settings, {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": array(2, 2, 2)})


def logits_of(folder, adapter=None):
    module, _ = mlx_lm.load(str(folder), adapter_path=adapter)[:2]
    return np.array(module(mx.array(TOKENS)))


@pytest.fixture
def outside(monkeypatch, tmp_path):
    """PyTorch, PEFT, and a function that loads a folder into transformers; skipped without them."""
    torch, peft = (pytest.importorskip(name, reason=f"{name} is not installed") for name in ("torch", "peft"))
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    return torch, peft, lambda base: AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tune", ["lora", "dora"])
def test_peft_loads_what_is_exported(outside, tmp_path, tune):
    """A run's adapters: merged by PEFT they compute what the run's final model does."""
    torch, peft, load = outside
    run = train(tmp_path, tune, tune)
    grpo("export", run, "--peft", "peft")
    want = logits_of(run / "final")
    assert np.abs(want - logits_of(tmp_path / f"base-{tune}")).max() > 1e-3
    merged = peft.PeftModel.from_pretrained(load(f"base-{tune}"), "peft").merge_and_unload()
    with torch.no_grad():
        found = merged(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(found - want).max() < 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tune", ["lora", "dora"])
def test_a_run_goes_on_from_pefts_adapters(outside, tmp_path, tune):
    """With patterns of rank and alpha, and rslora: the same logits, and training changes them."""
    torch, peft, load = outside
    make_model_folder(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_dora=tune == "dora",
                             rank_pattern={"layers.0.mlp.up_proj": 2}, alpha_pattern={"q_proj": 3},
                             use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM")  # fmt: skip
    tuned = peft.get_peft_model(load("base"), config)
    tuned.save_pretrained("peft")
    with torch.no_grad():
        want = tuned(torch.tensor(TOKENS)).logits.numpy()
    grpo("export", "peft", "--out", "fused")
    assert np.abs(logits_of(tmp_path / "fused") - want).max() < 1e-5
    model = {"path": "base", "tune": tune, "adapters": "peft"}
    run = ran(tmp_path, text=small(model=model, reward=BY_LETTERS, loss={"beta": 0.1})).result.folder
    stated = json.loads((run / "final" / "adapter_config.json").read_text())
    assert stated["fine_tune_type"] == tune and stated["lora_parameters"]["rank"] == 4
    assert np.abs(logits_of(run / "final") - want).max() < 0.1 * np.abs(want).max()
    grpo("export", run, "--peft", "again")


def test_adapters_are_exported_with_how_they_were_asked(tmp_path):
    """Beside PEFT's files."""
    grpo("export", train(tmp_path, "lora", "lora"), "--peft", tmp_path / "peft")
    names = {"adapter_config.json", "adapter_model.safetensors", "grpo_prompt.json"}
    assert {file.name for file in (tmp_path / "peft").iterdir()} == names


def test_a_model_without_adapters_is_a_line(tmp_path):
    """Nothing is written."""
    folder = make_model_folder(tmp_path / "m")
    done = grpo("export", folder, "--peft", tmp_path / "out", code=2)
    assert "adapter_config.json is missing; expected a folder of adapters" in done.stderr
    assert not (tmp_path / "out").exists()
