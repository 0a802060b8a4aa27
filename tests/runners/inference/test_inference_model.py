"""Loading to use: packed weights stay packed, adapters are applied or refused, all architectures speak."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from runners.errors import UserError
from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from tests.support.tiny_models import make_model_folder

CPU, GPU = Platform(backend="cpu"), Platform(backend="metal")
TOKENS = mx.array([[5, 9, 70, 31]])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A llama folder in bfloat16."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "llama", dtype="bfloat16")


@pytest.fixture
def adapter(llama, tmp_path):
    """Adapters for it, written as mlx-lm's trainer writes them, with an effect."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    module, _ = mlx_lm.load(str(llama))
    module.freeze()
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.5}
    linear_to_lora_layers(module, 2, parameters)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(leaf.shape) for name, leaf in tree_flatten(module.trainable_parameters())
    }
    folder = tmp_path / "adapter"
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, "model": str(llama)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_nothing_trains_and_the_dtype_is_the_platforms(llama):
    """float32 on a CPU, the model's own elsewhere, another one where asked for; the eval mode is on."""
    for platform, dtype, wanted in (
        (CPU, "auto", mx.float32),
        (GPU, "auto", mx.bfloat16),
        (CPU, "float16", mx.float16),
    ):
        model = load_inference(str(llama), platform, dtype=dtype)
        assert {leaf.dtype for _, leaf in tree_flatten(model.module.parameters())} == {wanted}
        assert tree_flatten(model.module.trainable_parameters()) == [] and not model.module.training
        assert model.engine.decoding.pipelined == (platform is GPU) and model.eos_ids == (2,)


def test_packed_weights_stay_packed(tmp_path):
    """A quantized folder computes what mlx-lm's own loading of it computes."""
    path = make_model_folder(tmp_path / "model", quantize={"group_size": 32, "bits": 4})
    model = load_inference(str(path), CPU)
    theirs, _ = mlx_lm.load(str(path))
    assert model.module.model.layers[0].self_attn.q_proj.bits == 4
    assert mx.allclose(model.module(TOKENS), theirs(TOKENS), rtol=1e-4, atol=1e-4)


def test_adapters_are_applied(llama, adapter):
    """As mlx-lm applies them, without dropout; by --adapter, or by naming the adapters' folder alone."""
    theirs, _ = mlx_lm.load(str(llama), adapter_path=str(adapter))
    theirs.set_dtype(mx.float32)
    expected = theirs(TOKENS)
    base = load_inference(str(llama), CPU)
    for model in (load_inference(str(llama), CPU, adapter=str(adapter)), load_inference(str(adapter), CPU)):
        assert model.adapter == adapter and model.path == llama
        assert mx.allclose(model.module(TOKENS), expected, rtol=1e-5, atol=1e-5)
        assert not mx.allclose(model.module(TOKENS), base.module(TOKENS), rtol=1e-2, atol=1e-2)


def test_unusable_adapters_are_errors(llama, adapter):
    """Missing files, two at once, a base that is not named."""
    with pytest.raises(UserError, match=r"holds adapters, and .* is given as well"):
        load_inference(str(adapter), CPU, adapter=str(adapter))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "model": None}))
    with pytest.raises(UserError, match=r"does not name the base model; expected .* --adapter"):
        load_inference(str(adapter), CPU)
    (adapter / "adapters.safetensors").unlink()
    with pytest.raises(UserError, match=r"adapters\.safetensors is missing"):
        load_inference(str(llama), CPU, adapter=str(adapter))
