"""Loading: complete folders in the right dtypes; incomplete ones are refused by name."""

import json
import shutil

import attrs
import mlx.core as mx
import pytest

from grpo_fn.trees import named_leaves
from runners.config.sections import LoraConfig, ModelConfig
from runners.errors import UserError
from runners.machine.startup import Platform
from runners.models.folders import resolve_model
from runners.models.loaded_model import load_model
from runners.models.model_reader import _finite
from tests.support.tiny_models import make_model_folder, make_tokenizer, write_tokenizer

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
    ("platform", "dtype", "compute"),
    [
        (CPU, "auto", mx.float32),
        (GPU, "auto", mx.bfloat16),
        (GPU, "float16", mx.float16),
        (CPU, "bfloat16", mx.bfloat16),
    ],
)
def test_full_tuning_trains_every_leaf_in_float32(llama, platform, dtype, compute):
    """Masters are float32 whatever the file and the computation have; the file's dtypes are remembered."""
    loaded = load(llama, platform, dtype=dtype)
    leaves = named_leaves(loaded.module.trainable_parameters())
    assert {leaf.dtype for leaf in leaves.values()} == {mx.float32}
    assert loaded.compute_dtype == compute
    assert loaded.frozen == {} and loaded.adapter is None
    assert loaded.source_dtypes == dict.fromkeys(leaves, mx.bfloat16)
    assert loaded.num_trainable == loaded.num_parameters == sum(leaf.size for leaf in leaves.values())
    assert loaded.eos_ids == (2,)


def test_masters_may_be_bfloat16(llama):
    """model.master is obeyed."""
    leaves = named_leaves(load(llama, master="bfloat16").module.trainable_parameters())
    assert {leaf.dtype for leaf in leaves.values()} == {mx.bfloat16}


def test_loaded_weights_compute_what_mlx_lm_computes(llama):
    """The prepared module has the logits of mlx-lm's own loader."""
    import mlx_lm

    module, tokenizer = mlx_lm.load(str(llama))
    tokens = mx.array([tokenizer.encode("7+5=12")])
    module.set_dtype(mx.float32)
    assert mx.array_equal(load(llama).module(tokens), module(tokens))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("tune", ["lora", "dora"])
@pytest.mark.parametrize("quantize", [None, QUANTIZED])
def test_adapters_train_alone_and_change_nothing_at_first(tmp_path, arch, tune, quantize):
    """Only adapters are trainable, in float32; the model with fresh ones is the base model."""
    path = make_model_folder(tmp_path / "model", arch, dtype="bfloat16", quantize=quantize)
    base = load(path, tune="lora", lora=LoraConfig(layers=1)).module
    loaded = load(path, tune=tune, lora=LoraConfig(rank=4, layers=1))
    names = named_leaves(loaded.module.trainable_parameters())
    assert {name.rsplit(".", 1)[1] for name in names} == (
        {"lora_a", "lora_b"} | ({"m"} if tune == "dora" else set())
    )
    assert all("layers.1." in name for name in names)  # the last of two
    assert {leaf.dtype for leaf in names.values()} == {mx.float32}
    assert {leaf.dtype for leaf in loaded.frozen.values()} <= {mx.float32, mx.uint32}
    assert loaded.quantized == bool(quantize)
    tokens = mx.array([[5, 9, 70, 31]])
    assert mx.allclose(loaded.module(tokens), base(tokens), rtol=1e-4, atol=1e-4)


def test_adapters_are_drawn_from_the_seed(llama):
    """One seed gives one A matrix, another seed another."""
    settings = ModelConfig(path=str(llama), tune="lora")
    name = "model.layers.0.self_attn.q_proj.lora_a"
    first, again, other = (
        named_leaves(load_model(settings, CPU, seed=s).module.parameters())[name] for s in (3, 3, 4)
    )
    assert mx.array_equal(first, again) and not mx.array_equal(first, other)


def test_full_tuning_of_packed_weights_is_refused(tmp_path):
    """Packed integers have no gradient; the message says what would work."""
    path = make_model_folder(tmp_path / "model", quantize=QUANTIZED)
    with pytest.raises(UserError, match=r'model.tune = "full".*quantized.*"lora"'):
        load(path)


def test_unknown_adapter_keys_and_too_many_layers_are_refused(llama):
    """mlx-lm would go on without adapters; here the nearest key, or the count of layers, is given."""
    with pytest.raises(UserError, match=r'"self_attn.qproj" .*did you mean self_attn.q_proj\?'):
        load(llama, tune="lora", lora=LoraConfig(keys=("self_attn.qproj",)))
    with pytest.raises(UserError, match=r"model.lora.layers = 3, but the model has 2"):
        load(llama, tune="lora", lora=LoraConfig(layers=3))


def test_adapter_keys_choose_the_layers(llama):
    """lora.keys is obeyed and recorded for mlx-lm's own loader."""
    loaded = load(llama, tune="lora", lora=LoraConfig(rank=2, scale=4.0, keys=("self_attn.q_proj",)))
    assert {name.split(".", 3)[3] for name in named_leaves(loaded.module.trainable_parameters())} == {
        "self_attn.q_proj.lora_a",
        "self_attn.q_proj.lora_b",
    }
    assert loaded.adapter == {
        "num_layers": -1,
        "lora_parameters": {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "expected weights in model"),
        ("tokenizer.json", "the tokenizer is missing; expected tokenizer.json or"),
        ("tokenizer_config.json", "tokenizer_config.json is missing"),
    ],
)
def test_a_missing_file_is_named(folder, name, message):
    """Each file that a model needs is missed before the model is loaded."""
    (folder / name).unlink()
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "[]", "found list, wanted a JSON object"),
        ("config.json", "{}", "model_type: expected a text, found nothing"),
        ("config.json", '{"model_type": "nosuch"}', "Model type nosuch not supported"),
        ("config.json", '{"model_type": "llama"}', "the model cannot be loaded: .*missing"),
        ("tokenizer.json", '{"version": "1.0"}', "the tokenizer cannot be loaded"),
        ("model.safetensors", "", "the file is empty"),
        ("model.safetensors", "not a tensor file", "cannot be read as safetensors: "),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}',
            "1 weight files are missing, the first is model-00001-of-00002",
        ),
    ],
)
def test_a_broken_file_is_named_in_one_line(folder, name, content, message):
    """The message is one line with the place and the reason."""
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_weights_cut_off_are_refused(folder):
    """A copy that stopped half-way is no model."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model.safetensors: .*is the file cut off"):
        load(folder)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_the_bits_tell_what_is_finite(dtype):
    """The check says what mx.isfinite says, of either sign, at every limit, wherever the entry stands."""
    limits = mx.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.0, limits.max, limits.min, 1e-7, -1e-7]
    rest = mx.random.normal((5, 7), key=mx.random.key(0)).astype(dtype)
    for value in [*values, float("inf"), -float("inf"), float("nan"), -float("nan")]:
        leaf = mx.where(mx.arange(7) == 6, mx.array(value, dtype), rest)
        for each in (leaf, leaf.T, -mx.abs(leaf), mx.array(value, dtype)):
            assert _finite(each) == mx.all(mx.isfinite(each)).item(), (value, each.shape)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(folder, value):
    """One NaN would make every number of the run NaN; the weight that holds it is named."""
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = mx.where(mx.arange(32) == 31, mx.array(value, mx.bfloat16), weights[name])
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(UserError, match=f"the weight {name} holds NaN or infinity"):
        load(folder)


def test_a_vocabulary_beyond_the_embedding_is_refused(tmp_path):
    """MLX would read past the table; both sizes are given."""
    path = make_model_folder(tmp_path / "model", vocab_size=312, tokenizer_size=320)
    with pytest.raises(UserError, match="token id 315, the model's embedding only 312 rows"):
        load(path)


def test_added_tokens_beyond_the_embedding_are_only_told_of(tmp_path):
    """Models are shipped with such tokens: 316 to 319 are the four tags, which the embedding lacks here."""
    path = make_model_folder(tmp_path / "model", vocab_size=316, tokenizer_size=320)
    assert load(path).notices == ("4 added tokens lie beyond the model's embedding and cannot be used",)


def test_an_embedding_larger_than_the_vocabulary_is_fine(tmp_path):
    """Embeddings are often padded to a round number."""
    assert load(make_model_folder(tmp_path / "model", vocab_size=384)).notices == ()


def test_end_tokens_come_from_both_configs(folder):
    """generation_config.json adds its own; a chat model ends with either."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert load(folder).eos_ids == (0, 2)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    "value", ["<|end|>", ["4"], [4, None], [[4]], -1, 2**31, 4.0, True, {"a": 1}, float("nan")], ids=repr
)
def test_end_tokens_are_token_ids(folder, name, value):
    """Anything else is refused before the model is loaded, in whichever file it stands."""
    stated = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(stated | {"eos_token_id": value}))
    with pytest.raises(UserError, match=f"{name}: eos_token_id: expected token ids, found "):
        load(folder)


def test_end_tokens_that_are_not_stated_or_too_large(folder):
    """null and an empty list leave it to config.json; an id beyond the embedding is refused."""
    for value, ends in (("null", (2,)), ("[]", (2,)), ("0", (0, 2))):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        assert load(folder).eos_ids == ends
    (folder / "generation_config.json").write_text('{"eos_token_id": 2147483647}')
    with pytest.raises(UserError, match="the end-of-text id 2147483647, the model's embedding only"):
        load(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("vocab_size", "512"), ("text_config", [1]), ("text_config", {"vocab_size": 5.5})),
        *(("num_hidden_layers", 10**9), ("quantization", 4), ("quantization", {"bits": "4"})),
        *(("rope_scaling", [1]), ("rope_scaling", "linear"), ("tie_word_embeddings", "no"), ("dtype", 16)),
        ("model_type", 5),
    ],
)
def test_a_key_of_another_type_is_named(folder, key, value):
    """Every key of config.json that is read, here or by mlx-lm, has one type."""
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | {key: value}))
    with pytest.raises(UserError, match=f"config.json: {key}[a-z_.]*: expected .*, found "):
        load(folder)


def test_a_model_without_end_token_is_told_of(folder):
    """Every completion would run to its full length: allowed, but said."""
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((folder / name).read_text())
        del content[key]
        (folder / name).write_text(json.dumps(content))
    loaded = load(folder)
    assert loaded.eos_ids == ()
    assert "no end-of-text token" in loaded.notices[0]


def test_own_code_runs_only_when_trusted(folder):
    """A model_file is code from a stranger: it runs with trust_remote_code alone, and the message says so."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    with pytest.raises(UserError, match=r"model.trust_remote_code = true"):
        load(folder)
    assert load(folder, trust_remote_code=True).num_parameters > 0


def test_names_that_lead_nowhere(folder, tmp_path, monkeypatch):
    """A missing folder, a file, adapters without a model, and a Hub name without a network are told apart."""
    with pytest.raises(UserError, match="there is no such folder; expected"):
        resolve_model("./nowhere/model")
    with pytest.raises(UserError, match="found a file"):
        resolve_model(str(folder / "config.json"))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"model": "org/base"}')
    with pytest.raises(UserError, match="these are adapters, not a model; their base model is org/base"):
        resolve_model(str(adapters))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r'model.path = "org/nothing-here"'):
        resolve_model("org/nothing-here")


def test_weights_of_another_kind_are_named_with_a_way_out(folder):
    """mlx-lm reads no PyTorch files, its converter neither; transformers can write them as safetensors."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"found pytorch_model.bin; transformers' from_pretrained"):
        load(folder)


def test_a_tokenizer_may_be_replaced(folder):
    """The helper writes a tokenizer on its own: without a chat template none is reported."""
    write_tokenizer(folder, make_tokenizer(), chat_template=False)
    assert not load(folder).tokenizer.has_chat_template


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A folder with a mixture of experts in bfloat16, and one with its weights packed."""
    folder = tmp_path_factory.mktemp("experts")
    return (
        make_model_folder(folder / "mixtral", "mixtral", dtype="bfloat16"),
        make_model_folder(folder / "packed", "mixtral", dtype="bfloat16", quantize=QUANTIZED),
    )


def test_experts_that_can_be_computed_are_loaded(experts):
    """In float32, which is what "auto" takes on a CPU; on a GPU; and packed, in 16 bits as well."""
    assert load(experts[0]).compute_dtype == mx.float32
    assert load(experts[0], GPU).compute_dtype == mx.bfloat16
    loaded = load(experts[1], tune="lora", dtype="bfloat16", lora=LoraConfig(keys=("self_attn.q_proj",)))
    tokens = mx.array([[1, 2, 3]])
    assert mx.isfinite(loaded.module(tokens)).all().item()
