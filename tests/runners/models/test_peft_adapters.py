"""PEFT's adapters: there and back, by their formula, with PEFT itself, and broken ones."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runners.errors import UserError
from runners.files.tensor_files import load_arrays
from runners.models import peft_adapters
from runners.models.adapters import read_folder
from runners.models.peft_adapters import from_peft, to_peft
from tests.support.commands import grpo
from tests.support.properties.strategies import examples
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, ran, small, train

TOKENS = [[5, 9, 70, 31, 12]]
Q, EMBEDDING, HEAD = "model.layers.{}.self_attn.q_proj", "model.embed_tokens", "lm_head"


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
    """mlx-lm's format -> PEFT's -> mlx-lm's keeps every bit, for any selection of blocks and layers."""
    layers = [outer + Q.format(block) for block in blocks]
    layers += [outer + EMBEDDING, outer + HEAD] if embeds and not dora else []
    tensors = {}
    for layer in layers:
        tensors |= {f"{layer}.lora_a": array(6, rank), f"{layer}.lora_b": array(rank, 4, seed=1)}
        tensors |= {f"{layer}.m": array(4, seed=2)} if dora else {}
    kind = "dora" if dora else "lora"
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    stated = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, "model": "a/b"}
    config, theirs = to_peft(stated, tensors)
    back = from_peft(config, theirs, Path())
    assert back.settings == stated | {"lora_parameters": parameters | {"keys": sorted(layers)}}
    assert back.tensors.keys() == tensors.keys()
    assert all(mx.array_equal(back.tensors[name], tensors[name]) for name in tensors)
    names = {"q_proj", *(["embed_tokens", "lm_head"] if len(layers) > len(blocks) else [])}
    assert (set(config["target_modules"]) == names) == (0 in blocks)


@settings(max_examples=examples(12))
@given(
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    alpha=st.floats(0.5, 32),
    other=st.none() | st.floats(0.5, 32),
    root=st.booleans(),
)
def test_every_scale_and_rank_is_pefts(ranks, alpha, other, root):
    """The update is PEFT's: alpha / r or alpha / √r, and the first pattern that matches sets alpha."""
    stated = {"peft_type": "LORA", "lora_alpha": alpha, "use_rslora": root, "r": ranks[0]}
    patterns = {r".*\.(0|2)\..*": None, r"^model\.layers\.[1-9]\.self_attn.[qk]_proj": other, "q_proj": 7.0}
    stated |= {"alpha_pattern": {key: value or alpha for key, value in patterns.items()}} if other else {}
    theirs, want = {}, {}
    for block, rank in enumerate(ranks):
        a, b = array(rank, 6, seed=block), array(4, rank, seed=block + 9)
        layer = Q.format(block)
        theirs |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
        own = other if other and block == 1 else alpha
        want[layer] = own / (rank**0.5 if root else rank) * (b @ a)
    adapters = from_peft(stated, theirs, Path())
    parameters, found = adapters.settings["lora_parameters"], adapters.tensors
    assert parameters["rank"] == max(ranks)
    for layer, update in want.items():
        ours = parameters["scale"] * (found[f"{layer}.lora_a"] @ found[f"{layer}.lora_b"]).T
        assert np.allclose(np.array(ours), np.array(update), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "alphas"), [("layers.0.self_attn.q_proj", (3, 5)), ("q_proj", (3, 3))])
def test_the_first_pattern_that_matches_decides(first, alphas):
    """As in PEFT: a later pattern applies only to layers that the first one does not match."""
    patterns = {first: 3, **{name: 5 for name in ("layers.0.self_attn.q_proj", "q_proj") if name != first}}
    stated = {"lora_alpha": 4, "alpha_pattern": patterns}
    scales = peft_adapters._scales(stated, {Q.format(0): 2, Q.format(1): 2}, Path())
    assert tuple(scales.values()) == tuple(alpha / 2 for alpha in alphas)


def test_one_process_matches_all_patterns_until_one_takes_too_long():
    """A pattern that exceeds the time limit ends the process; the next pattern starts a new one."""

    def scale(pattern):
        stated = {"lora_alpha": 2, "alpha_pattern": {pattern: 8.0}}
        (found,) = peft_adapters._scales(stated, {"a" * 60 + ".q_proj": 4}, Path("adapters")).values()
        return found

    def process():
        return peft_adapters._match.start()[0].pid

    assert (scale("q_proj"), scale("k_proj")) == (2.0, 0.5)
    first = process()
    assert scale("[a-z]_proj") == 2.0 and process() == first
    with pytest.raises(UserError, match="alpha_pattern: expected regular expressions that can be matched"):
        scale("(a+)+!")
    assert scale("q_proj") == 2.0 and process() != first


DORA = {
    "base_model.model.model.embed_tokens.lora_embedding_A": array(2, 320),
    "base_model.model.model.embed_tokens.lora_embedding_B": array(32, 2),
    "base_model.model.model.embed_tokens.lora_magnitude_vector": array(32),
}
A, B = f"base_model.model.{Q.format(0)}.lora_A.weight", f"base_model.model.{Q.format(0)}.lora_B.weight"


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type: expected LORA"),
        ({"lora_alpha": float("inf")}, {}, "lora_alpha: expected a number"),
        ({"bias": "all"}, {}, "bias: expected none"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save: expected none"),
        ({"fan_in_fan_out": True, "lora_bias": True}, {}, "fan_in_fan_out: expected none"),
        ({"alpha_pattern": {r"([a-z._]+\d?)+!": 2}}, {}, "alpha_pattern: expected regular expressions that"),
        ({"alpha_pattern": {"q_proj(": 2}}, {}, r"alpha_pattern: expected .*, found \[.q_proj\("),
        ({"use_dora": True}, DORA, "model.embed_tokens: mlx-lm's DoRA of an embedding differs from PEFT's"),
        ({"alpha_pattern": {"q": "2"}}, {}, "alpha_pattern: expected a JSON object whose values are"),
        ({}, {"../../x": array(2, 2)}, "is not part of a LoRA"),
        ({}, {B: array(4, 2)}, "expected lora_A and lora_B of the same rank"),
        ({}, {A: array(3, 6)}, "expected lora_A and lora_B of the same rank"),
        ({}, {A: array(2, 6, 1)}, "is not part of a LoRA"),
        ({}, {A: mx.zeros((0, 6)), B: mx.zeros((4, 0))}, "a rank of at least 1, found 0"),
        ({}, None, "found none"),
    ],
)
def test_adapters_that_mlx_lm_does_not_support_are_refused(tmp_path, settings, tensors, message):
    """Reading the folder raises the error, before any model is read."""
    stated = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, "base_model_name_or_path": "a/b"} | settings
    (tmp_path / "adapter_config.json").write_text(json.dumps(stated))
    whole = {A: array(2, 6), B: array(4, 2)} | (tensors or {})
    whole = {B: whole[B]} if tensors and tensors.keys() == {B} else whole
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), {} if tensors is None else whole)
    with pytest.raises(UserError, match=message):
        read_folder(tmp_path)


def test_some_adapters_have_no_form_in_peft():
    """Experts' adapters have three dimensions, and DoRA of an embedding has its magnitudes per row."""
    stated = {"lora_parameters": {"rank": 2, "scale": 1.0}, "fine_tune_type": "dora"}
    with pytest.raises(UserError, match="experts"):
        to_peft(stated, {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": array(2, 2, 2)})
    with pytest.raises(UserError, match="DoRA of an embedding"):
        to_peft(stated, {f"{EMBEDDING}.lora_a": array(6, 2), f"{EMBEDDING}.m": array(6)})
    with pytest.raises(UserError, match="a name that ends with lora_a, lora_b"):
        to_peft(stated, {"model.layers.0.self_attn.q_proj.extra": array(2, 2)})


def written(folder, tie, tensors, **stated):
    """Writes a tiny model and, next to it, adapters for it in PEFT's format."""
    base = make_model_folder(folder / "base", tie=tie)
    adapters = folder / "peft"
    adapters.mkdir()
    stated = {"peft_type": "LORA", "lora_alpha": 4, "r": 2, "base_model_name_or_path": str(base)} | stated
    (adapters / "adapter_config.json").write_text(json.dumps(stated))
    weights, _ = load_arrays(base / "model.safetensors")
    named = {f"base_model.model.{name}": leaf for name, leaf in tensors(weights)}
    mx.save_safetensors(str(adapters / "adapter_model.safetensors"), named)
    return adapters


def over_embedding(weights):
    yield f"{EMBEDDING}.base_layer.weight", weights[f"{EMBEDDING}.weight"].astype(mx.bfloat16)
    yield f"{EMBEDDING}.lora_embedding_A", array(2, 320)
    yield f"{EMBEDDING}.lora_embedding_B", array(32, 2, seed=1)


def over_head(weights):
    yield f"{HEAD}.base_layer.weight", weights.get(f"{HEAD}.weight", weights[f"{EMBEDDING}.weight"])
    yield f"{HEAD}.lora_A.weight", array(2, 32, seed=2)
    yield f"{HEAD}.lora_B.weight", array(320, 2, seed=3)


UPDATES = {
    EMBEDDING: (array(32, 2, seed=1) @ array(2, 320)).T,
    HEAD: array(320, 2, seed=3) @ array(2, 32, seed=2),
}


def mirrored(weights):
    yield from over_embedding(weights)
    yield f"{HEAD}.base_layer.weight", weights[f"{EMBEDDING}.weight"]
    yield f"{HEAD}.lora_A.weight", array(32, 2, seed=1).T
    yield f"{HEAD}.lora_B.weight", array(2, 320).T


def moved(weights):
    for name, leaf in over_head(weights):
        yield name, leaf * 1.01 if "base" in name else leaf


@pytest.mark.parametrize(
    ("tie", "tensors", "changed"),
    [
        (False, over_embedding, EMBEDDING),
        (False, over_head, HEAD),
        (True, mirrored, EMBEDDING),
    ],
)
def test_embedding_and_head_are_read_with_the_weights_under_them(tmp_path, tie, tensors, changed):
    """PEFT saves these weights with the adapters; a tied head uses the embedding's adapters."""
    adapters = written(tmp_path, tie, tensors)
    grpo("export", adapters, "--out", tmp_path / "fused")
    before, after = (load_arrays(tmp_path / at / "model.safetensors")[0] for at in ("base", "fused"))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        want = weight + 2.0 * UPDATES[changed] if name == f"{changed}.weight" else weight
        assert mx.allclose(after[name], want, atol=1e-2, rtol=1e-2), name


@pytest.mark.parametrize(
    ("tie", "tensors", "message"),
    [
        (True, over_embedding, "but the adapters change the two separately"),
        (True, over_head, "but the adapters change the two separately"),
        (False, moved, "lm_head has weights that differ from the adapters' base_layer"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(tmp_path, tie, tensors, message):
    """A tied head without adapters, a tied head with its own adapters, and different base weights."""
    done = grpo("export", written(tmp_path, tie, tensors), "--out", tmp_path / "fused", code=2)
    assert "the adapters do not fit" in done.stderr and message in done.stderr
    assert "\n" not in done.stderr.strip() and not (tmp_path / "fused").exists()


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
    """After PEFT has merged a run's adapters, the model computes the final model's logits."""
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
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("targets", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj"]])
def test_embedding_and_head_compute_as_in_peft(outside, tmp_path, tie, targets):
    """In both directions, with tied and untied heads; a tied head changes with its embedding."""
    torch, peft, load = outside
    make_model_folder(tmp_path / "base", tie=tie)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False,
                             ensure_weight_tying=tie, task_type="CAUSAL_LM")  # fmt: skip
    tuned = peft.get_peft_model(load("base"), config)
    tuned.save_pretrained("peft", save_embedding_layers=True)
    with torch.no_grad():
        want = tuned(torch.tensor(TOKENS)).logits.numpy()
    grpo("export", "peft", "--out", "fused")
    assert np.abs(logits_of(tmp_path / "fused") - want).max() < 1e-5 * np.abs(want).max()
    grpo("export", "peft", "--peft", "again")
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(load("base"), "again")(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(again - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tune", ["lora", "dora"])
def test_a_run_goes_on_from_pefts_adapters(outside, tmp_path, tune):
    """Adapters with rank and alpha patterns and rslora have PEFT's logits, and training changes them."""
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


def test_adapters_are_exported_with_their_prompt_settings(tmp_path):
    """grpo_prompt.json is written next to PEFT's files."""
    grpo("export", train(tmp_path, "lora", "lora"), "--peft", tmp_path / "peft")
    names = {"adapter_config.json", "adapter_model.safetensors", "grpo_prompt.json"}
    assert {file.name for file in (tmp_path / "peft").iterdir()} == names


def test_a_model_without_adapters_is_not_exported_to_peft(tmp_path):
    """The command ends with a line and writes nothing."""
    folder = make_model_folder(tmp_path / "m")
    done = grpo("export", folder, "--peft", tmp_path / "out", code=2)
    assert "adapter_config.json is missing; expected a folder of adapters" in done.stderr
    assert not (tmp_path / "out").exists()
