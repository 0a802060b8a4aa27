"""Adapters must be complete, finite, and made for the model that they are applied to."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import pytest

from runners.config.loading import load_config
from runners.config.sections import LoraConfig, ModelConfig
from runners.conversion.export import open_source
from runners.errors import ConfigError, UserError
from runners.files.tensor_files import load_arrays, save_arrays
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from runners.models.adapters import SAMPLED, WHOLE, base_digest, check_adapters
from runners.models.folders import resolve_model
from runners.models.loaded_model import load_model
from runners.models.model_writer import trained, write_trained
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import small

CPU = Platform(backend="cpu")
TOKENS = mx.array([[5, 9, 70, 31]])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and random adapters for it in the files of a run."""
    folder = tmp_path_factory.mktemp("made")
    path = make_model_folder(folder / "base", dtype="bfloat16")
    loaded = load_model(ModelConfig(path=str(path), tune="lora", lora=LoraConfig(rank=2, scale=4.0)), CPU)
    (folder / "adapter").mkdir()
    weights, key = trained(loaded.module.trainable_parameters(), loaded), mx.random.key(1)
    drawn = {name: mx.random.normal(leaf.shape, key=key) for name, leaf in weights.items()}
    write_trained(folder / "adapter", drawn, loaded)
    (folder / "adapter" / "config.json").unlink()
    return folder


@pytest.fixture
def base(made, tmp_path, monkeypatch):
    """A copy of the model in the current folder."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(made / "base", tmp_path / "base")


@pytest.fixture
def adapter(made, base, tmp_path):
    """A copy of its adapters."""
    folder = shutil.copytree(made / "adapter", tmp_path / "adapter")
    edit(folder, model=str(base))
    return folder


def edit(folder, **changes):
    """Changes keys of adapter_config.json; None removes them."""
    file = folder / "adapter_config.json"
    settings = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("scale", "x", 'lora_parameters.scale: expected a finite number, found "x"'),
        ("scale", True, "lora_parameters.scale: expected a finite number, found true"),
        pytest.param("scale", 10**400, "expected a finite number, found an integer of 1329 bits", id="huge"),
        ("rank", 0, "lora_parameters.rank: expected an integer from 1, found 0"),
        ("keys", "q_proj", "lora_parameters.keys: expected a list of layers' names, found"),
        ("fine_tune_type", "full", 'expected lora or dora, found "full"'),
        ("lora_parameters", [1], "lora_parameters: expected a JSON object with rank and scale"),
        ("num_layers", None, "num_layers: expected a number of layers, or -1 for all, found nothing"),
    ],
)
def test_settings_that_mlx_lm_cannot_compute_with(adapter, key, value, line):
    """The error names the key, what is expected and what was found, in one line."""
    table = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    edit(
        adapter,
        **({"lora_parameters": {**table, key: value}} if key in table or key == "keys" else {key: value}),
    )
    with pytest.raises(UserError) as caught:
        check_adapters(adapter)
    assert line in str(caught.value) and "\n" not in str(caught.value)


LEAF = "model.layers.0.self_attn.q_proj.lora_a"
SPOILT = {
    "three of the tensors": (
        lambda weights: {name: weights[name] for name in sorted(weights)[:3]},
        r"lora_[ab]\": expected the shape \[\d+, \d+\], found nothing",
    ),
    "NaN": (
        lambda weights: weights | {LEAF: weights[LEAF] * float("nan")},
        r"adapters\.safetensors: the weight .*lora_a contains NaN or infinity",
    ),
    "integers": (
        lambda weights: weights | {LEAF: weights[LEAF].astype(mx.int32)},
        r"lora_a\": expected floating numbers, found mlx",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_incomplete_and_invalid_tensors_are_refused(base, adapter, name):
    """Neither inference nor export accepts missing tensors, NaN or integers."""
    spoil, line = SPOILT[name]
    file = adapter / "adapters.safetensors"
    save_arrays(file, spoil(load_arrays(file)[0]), {})
    with pytest.raises(UserError, match=line):
        load_inference(str(base), CPU, adapter=str(adapter))
    with pytest.raises(UserError, match=line):
        open_source(str(adapter), base.parent / "out")
    assert not (base.parent / "out").exists()


def test_adapters_know_their_base(base, adapter, tmp_path):
    """The base may be in another folder or dtype; different weights are refused, with both names."""
    assert load_inference(str(base), CPU, adapter=str(adapter)).notices == ()
    shutil.copytree(base, tmp_path / "moved")
    weights, metadata = load_arrays(base / "model.safetensors")
    wide = {name: leaf.astype(mx.float32) for name, leaf in weights.items()}
    save_arrays(tmp_path / "moved" / "model.safetensors", wide, metadata)
    assert load_inference(str(tmp_path / "moved"), CPU, adapter=str(adapter)).notices == ()
    other = make_model_folder(tmp_path / "other", dtype="bfloat16", seed=1)
    line = f"{adapter}: the adapters were made for weights that differ from those of {other}; their base "
    with pytest.raises(UserError, match=line):
        load_inference(str(other), CPU, adapter=str(adapter))
    edit(adapter, model=str(other))
    with pytest.raises(UserError, match="made for weights that differ"):
        open_source(str(adapter), tmp_path / "out")
    edit(adapter, base_digest=7)
    with pytest.raises(UserError, match="made for weights that differ"):
        load_inference(str(base), CPU, adapter=str(adapter))


def test_adapters_without_base_digest_are_applied(base, adapter, tmp_path):
    """mlx-lm's trainer writes such adapters. They have mlx-lm's logits without dropout, given as --adapter or
    as the model."""
    table = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    edit(adapter, base_digest=None, lora_parameters=table | {"dropout": 0.5})
    theirs, _ = mlx_lm.load(str(base), adapter_path=str(adapter))[:2]
    theirs.set_dtype(mx.float32)
    want, plain = theirs(TOKENS), load_inference(str(base), CPU).module(TOKENS)
    for place, given in ((base, str(adapter)), (adapter, "")):
        model = load_inference(str(place), CPU, adapter=given)
        assert (model.path, model.notices) == (base, ())
        assert mx.allclose(model.module(TOKENS), want, rtol=1e-5, atol=1e-5)
        assert not mx.allclose(model.module(TOKENS), plain, rtol=1e-2, atol=1e-2)
    assert grpo("export", adapter, "--out", tmp_path / "out").stderr == ""


def test_unusable_adapters_are_errors(base, adapter):
    """Adapters as a model to train, two at once, an unnamed base, and missing files."""
    with pytest.raises(UserError, match=r"these are adapters, not a model; .* set model\.adapters"):
        resolve_model(str(adapter))
    with pytest.raises(UserError, match=r"contains adapters, and .* is also given"):
        load_inference(str(adapter), CPU, adapter=str(adapter))
    edit(adapter, model=None)
    with pytest.raises(UserError, match=r"does not name the base model; expected .* --adapter"):
        load_inference(str(adapter), CPU)
    (adapter / "adapters.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapters\.safetensors is missing"):
        load_inference(str(base), CPU, adapter=str(adapter))


def test_the_digest_sees_every_number_of_a_small_leaf_and_all_parts_of_a_large_one():
    """It depends on names, shapes and numbers, but not on the dtype; sampled positions are spread evenly."""
    leaf = mx.random.normal((WHOLE // 64, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    digest = base_digest({"a": leaf})
    assert base_digest({"a": leaf.astype(mx.float32)}) == digest
    for other in ({"b": leaf}, {"a": leaf.reshape(-1)}, {"a": leaf, "b": leaf}):
        assert base_digest(other) != digest
    for row, column in ((0, 0), (511, 33), (WHOLE // 64 - 1, 63)):
        changed = mx.array(leaf)
        changed[row, column] += 1
        assert base_digest({"a": changed}) != digest
    large = mx.zeros((1000, 700))
    for part in range(64):  # a sixty-fourth of the numbers, anywhere
        changed = mx.zeros(large.size)
        width = large.size // 64
        changed[part * width : (part + 1) * width] = 1
        assert base_digest({"a": changed.reshape(large.shape)}) != base_digest({"a": large})
    assert SAMPLED < WHOLE


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tune": "full"}, 'model.tune: expected "lora" or "dora" with model.adapters, found "full"'),
        ({"tune": "dora"}, 'contains adapters of fine_tune_type "lora"; expected model.tune = "lora"'),
        ({"adapters": "nosuch"}, 'model.adapters: no such folder: "nosuch"'),
        ({"adapters": "base"}, "adapter_config.json is missing; expected a folder of adapters"),
        ({"adapters": "."}, r"from mlx-lm or PEFT; did you mean final\?"),
        ({"path": "."}, r"expected an mlx-lm model folder; did you mean .*final\?"),
        ({"path": "other"}, "the adapters were made for weights that differ from those of .*other"),
        ({"adapters": "wide"}, r'wide: the adapters do not fit .*base: ".*lora_[ab]": expected the shape'),
        ({"path": "deep"}, r"expected the shape \[\d+, \d+\], found nothing"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(*value.items()),
)
def test_adapters_that_a_run_cannot_continue_from(base, adapter, tmp_path, change, line):
    """The run ends before its first step; one line names the folder and what was expected."""
    make_model_folder(tmp_path / "other", seed=1)
    shutil.copytree(adapter, tmp_path / "wide")
    edit(tmp_path / "wide", lora_parameters={"rank": 3, "scale": 1.0, "dropout": 0.0})
    make_model_folder(tmp_path / "deep", layers=3)
    (tmp_path / "final").mkdir()
    model = {"path": "base", "tune": "lora", "adapters": "adapter", **change}
    (tmp_path / "run.toml").write_text(small(model=model))
    with pytest.raises((UserError, ConfigError), match=line):
        run_training(load_config("run.toml"), report=Quiet())
