"""Loading: complete folders in the right dtypes; incomplete ones are refused by name."""

import json
import shutil
from pathlib import Path

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest

from grpo_fn.policy import is_quantized
from grpo_fn.trees import named_leaves
from runners.config.sections import LoraConfig, ModelConfig
from runners.errors import UserError
from runners.files.run_files import COMPLETIONS, EVALUATIONS, EVENTS, METRICS, RESOLVED
from runners.files.tensor_files import load_arrays, save_arrays
from runners.machine.startup import Platform
from runners.models.adapters import new_adapters
from runners.models.folders import copy_companions, resolve_model
from runners.models.loaded_model import load_model
from runners.models.model_reader import check_finite, load_module, load_tokenizer
from tests.support.commands import grpo
from tests.support.damage import containing, stating, without
from tests.support.tiny_models import make_model_folder

CPU, GPU = Platform(backend="cpu"), Platform(backend="metal")
QUANTIZED = {"group_size": 32, "bits": 4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A llama folder in bfloat16 that no test changes."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "llama", dtype="bfloat16")


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of the llama folder, to be damaged."""
    return shutil.copytree(llama, tmp_path / "model")


def load(path, platform=CPU, **changes):
    """Loads with the config's defaults but for `changes`."""
    return load_model(attrs.evolve(ModelConfig(path=str(path)), **changes), platform)


@pytest.mark.parametrize(
    ("platform", "dtype", "compute", "master"),
    [
        (CPU, "auto", mx.float32, "float32"),
        (GPU, "auto", mx.bfloat16, "float32"),
        (GPU, "float16", mx.float16, "float32"),
        (CPU, "bfloat16", mx.bfloat16, "bfloat16"),
    ],
)
def test_full_tuning_trains_every_leaf_in_the_master_dtype(llama, platform, dtype, compute, master):
    """The master dtype does not depend on the file's or the compute dtype; the file's are recorded."""
    loaded = load(llama, platform, dtype=dtype, master=master)
    leaves = named_leaves(loaded.module.trainable_parameters())
    assert {leaf.dtype for leaf in leaves.values()} == {getattr(mx, master)}
    assert loaded.compute_dtype == compute
    assert loaded.frozen == {} and loaded.adapter is None
    assert loaded.source_dtypes == dict.fromkeys(leaves, mx.bfloat16)
    assert loaded.num_trainable == loaded.num_parameters == sum(leaf.size for leaf in leaves.values())
    assert loaded.eos_ids == (2,)


@pytest.mark.parametrize("tune", ["lora", "dora"])
@pytest.mark.parametrize("quantize", [None, QUANTIZED])
def test_adapters_train_alone_and_change_nothing_at_first(tmp_path, tune, quantize):
    """Only the adapters are trainable, in float32, and new adapters do not change the outputs."""
    path = make_model_folder(tmp_path / "model", "qwen2", dtype="bfloat16", quantize=quantize)
    base = load(path, tune="lora", lora=LoraConfig(layers=1)).module
    loaded = load(path, tune=tune, lora=LoraConfig(rank=4, layers=1))
    names = named_leaves(loaded.module.trainable_parameters())
    assert {name.rsplit(".", 1)[1] for name in names} == (
        {"lora_a", "lora_b"} | ({"m"} if tune == "dora" else set())
    )
    assert all("layers.1." in name for name in names)  # the last of two
    assert {leaf.dtype for leaf in names.values()} == {mx.float32}
    assert {leaf.dtype for leaf in loaded.frozen.values()} <= {mx.float32, mx.uint32}
    assert is_quantized(loaded.module) == bool(quantize)
    tokens = mx.array([[5, 9, 70, 31]])
    assert mx.allclose(loaded.module(tokens), base(tokens), rtol=1e-4, atol=1e-4)


def test_unknown_adapter_keys_are_refused(llama):
    """mlx-lm would continue without adapters; the error names the nearest key."""
    with pytest.raises(UserError, match=r'"self_attn.qproj" .*did you mean self_attn.q_proj\?'):
        load(llama, tune="lora", lora=LoraConfig(keys=("self_attn.qproj",)))
    module = load_module(llama, False)[0]
    module.vision = [nn.Linear(2, 2)]  # no layer of the language model
    module.vision[0].inner = nn.Linear(2, 2)
    with pytest.raises(UserError, match='"inner" is not a linear or embedding layer'):
        new_adapters(module, "lora", LoraConfig(keys=("inner",)), 0)
    new_adapters(module, "lora", LoraConfig(keys=("vision.0.inner",)), 0)
    assert len(named_leaves(module.trainable_parameters())) == 2


def test_adapter_keys_choose_the_layers(llama):
    """lora.keys selects the layers and is recorded for mlx-lm's own loader."""
    loaded = load(llama, tune="lora", lora=LoraConfig(rank=2, scale=4.0, keys=("self_attn.q_proj",)))
    assert {name.split(".", 3)[3] for name in named_leaves(loaded.module.trainable_parameters())} == {
        "self_attn.q_proj.lora_a",
        "self_attn.q_proj.lora_b",
    }
    assert loaded.adapter == {
        "num_layers": -1,
        "lora_parameters": {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }


def cut_off(folder):
    """Truncates the weights, like an interrupted copy."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def holding(value):
    """Replaces one number of a weight."""

    def act(folder):
        weights, metadata = load_arrays(folder / "model.safetensors")
        weights[WEIGHT] = mx.where(mx.arange(32) == 31, mx.array(value, mx.bfloat16), weights[WEIGHT])
        save_arrays(folder / "model.safetensors", weights, metadata)

    return act


def as_pytorch_writes_it(folder):
    """Renames the weights to PyTorch's file name, which mlx-lm does not read."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def also_as(name):
    """Writes one of the weights to a second file, with different numbers."""

    def act(folder):
        arrays, _ = load_arrays(folder / "model.safetensors")
        save_arrays(folder / name, {WEIGHT: arrays[WEIGHT] + 1}, {"format": "pt"})

    return act


WEIGHT = "model.layers.1.mlp.up_proj.weight"
SHARDS = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}'
TWICE = {  # a file of an older model -> what the message says
    "model-00001-of-00002.safetensors": r"model-00001-of-00002\.safetensors and in model\.safetensors",
    "model.fp16.safetensors": r"model\.fp16\.safetensors and in model\.safetensors",
}
NO_IDS = ("<|end|>", [4, None], [[4]], -1, 2**31, 4.0, True)
OTHER_TYPES = (
    *(("vocab_size", "512"), ("text_config", [1]), ("text_config", {"vocab_size": 5.5})),
    *(("num_hidden_layers", 10**9), ("quantization", 4), ("rope_scaling", [1]), ("model_type", 5)),
)
DAMAGE = [
    (without("config.json"), "config.json is missing"),
    (without("model.safetensors"), "expected weights in model"),
    (without("tokenizer.json"), "the tokenizer is missing; expected tokenizer.json or"),
    (without("tokenizer_config.json"), "tokenizer_config.json is missing"),
    (as_pytorch_writes_it, "found pytorch_model.bin; transformers' from_pretrained"),
    (containing("config.json", "{"), "config.json: cannot be read as JSON"),
    (containing("config.json", "[]"), "expected a JSON object, found list"),
    (containing("config.json", "{}"), "model_type: expected a text, found nothing"),
    (containing("config.json", '{"model_type": "nosuch"}'), "Model type nosuch not supported"),
    (containing("config.json", '{"model_type": "llama"}'), "the model cannot be loaded: .*missing"),
    (containing("tokenizer.json", '{"version": "1.0"}'), "the tokenizer cannot be loaded"),
    (containing("model.safetensors", ""), "cannot be read as safetensors"),
    (containing("model.safetensors", "not a tensor file"), "cannot be read as safetensors: "),
    (containing("model.safetensors.index.json", SHARDS), "1 weight files are missing; the first is model-00"),
    (cut_off, "model.safetensors: .*is the file truncated"),
    *(
        (also_as(name), rf"expected each tensor once, found .* in {files}; remove")
        for name, files in TWICE.items()
    ),
    *(
        (holding(x), f"the weight {WEIGHT} contains NaN or infinity")
        for x in map(float, ("nan", "inf", "-inf"))
    ),
    *(
        (stating(f"{kind}.json", eos_token_id=x), f"{kind}.json: eos_token_id: expected token ids, found ")
        for kind in ("config", "generation_config")
        for x in NO_IDS
    ),
    *((stating("config.json", **{k: x}), f"{k}[a-z_.]*: expected .*, found ") for k, x in OTHER_TYPES),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_in_one_line(folder, damage, message):
    """The line names the file, the key or the weight, and what is expected; nothing is computed."""
    damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_packed_model_is_not_tuned_in_full(tmp_path):
    """Packed integers have no gradient. The message names a command that unpacks them, and it works."""
    path = make_model_folder(tmp_path / "packed", quantize=QUANTIZED)
    wanted = rf'"lora" or "dora", or a model dequantized with `grpo convert {path} --out NEW --dequantize`'
    with pytest.raises(UserError, match=rf'model.tune = "full".*quantized: .*{wanted}$'):
        load(path)
    grpo("convert", path, "--out", tmp_path / "new", "--dequantize")
    assert load(tmp_path / "new").num_trainable > 0


@pytest.mark.parametrize(
    ("kind", "told"), [("qwen2", False), ("llama", False), ("mistral", None), ("ministral3", None)]
)
def test_no_other_tokenizer_is_taken_for_mistrals(folder, monkeypatch, kind, told):
    """transformers 5.7 to 5.12 warns about Mistral's regex if config.json names no transformers version."""
    given = {}
    monkeypatch.setattr("mlx_lm.utils.load_tokenizer", lambda path, settings, **more: given.update(settings))
    stating("config.json", model_type=kind)(folder)
    load_tokenizer(folder)
    assert given.get("fix_mistral_regex") is told


def test_a_runs_own_files_are_not_copied_with_the_model(folder, tmp_path):
    """If a run's folder contains the model, its log and completions are not copied into `final`."""
    written = {RESOLVED, METRICS, EVENTS, COMPLETIONS, EVALUATIONS}
    for name in {*written, "more.jsonl"}:
        (folder / name).write_text("{}")
    (tmp_path / "final").mkdir()
    copy_companions(folder, tmp_path / "final")
    names = {file.name for file in (tmp_path / "final").iterdir()}
    assert not written & names and {"more.jsonl", "tokenizer.json"} <= names


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_a_weight_is_finite_or_refused(dtype):
    """The check agrees with mx.isfinite for both signs, at the dtype's limits, at any position."""
    limits = mx.finfo(dtype)
    rest = mx.random.normal((5, 7), key=mx.random.key(0)).astype(dtype)
    for value in (0.0, limits.max, limits.min, *map(float, ("inf", "-inf", "nan"))):
        for leaf in (mx.where(mx.arange(7) == 6, mx.array(value, dtype), rest), mx.array(value, dtype)):
            if mx.all(mx.isfinite(leaf)).item():
                check_finite({"a": leaf, "b": -mx.abs(leaf), "c": mx.zeros((0, 2), dtype)}, Path("model"))
                continue
            with pytest.raises(UserError, match="model: the weight a contains NaN or infinity"):
                check_finite({"a": leaf.T}, Path("model"))


def test_embeddings_smaller_and_larger_than_the_vocabulary(tmp_path):
    """Embeddings smaller than the vocabulary are refused, because MLX would read past their end. Added tokens
    (here the four tags) may exceed them, because some models ship like this. Larger ones are padded."""

    def of(vocab_size):
        return make_model_folder(tmp_path / str(vocab_size), vocab_size=vocab_size, tokenizer_size=320)

    with pytest.raises(UserError, match="token id 315, but the model's embedding has only 312 rows"):
        load(of(312))
    assert load(of(316)).notices == ("4 added tokens are outside the model's embedding and cannot be used",)
    assert load(of(384)).notices == ()


def test_own_code_runs_only_when_trusted(folder):
    """A model_file is untrusted code: it runs only with trust_remote_code, and the message says so."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(UserError, match=r"model.trust_remote_code = true"):
        load(folder)
    assert load(folder, trust_remote_code=True).num_parameters > 0


def test_unknown_model_names_are_refused(folder, tmp_path, monkeypatch):
    """A missing folder, a file, and a Hub name without a network have different messages."""
    with pytest.raises(UserError, match="there is no such folder; expected"):
        resolve_model("./nowhere/model")
    with pytest.raises(UserError, match='MODEL = "org/name@main" is a name with a revision; expected only'):
        resolve_model("org/name@main", "MODEL")
    with pytest.raises(UserError, match="found a file"):
        resolve_model(str(folder / "config.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r'model.path = "org/nothing-here"'):
        resolve_model("org/nothing-here")
