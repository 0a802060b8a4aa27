"""Loading for inference: nothing is trainable, dtypes follow the platform, packed weights stay packed."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from runners.inference.inference_model import load_inference
from runners.machine.startup import Platform
from tests.support.tiny_models import make_model_folder

CPU, GPU = Platform(backend="cpu"), Platform(backend="metal")
TOKENS = mx.array([[5, 9, 70, 31]])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A llama folder in bfloat16."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "llama", dtype="bfloat16")


def test_nothing_is_trainable_and_the_dtype_follows_the_platform(llama):
    """The dtype is float32 on a CPU and the model's elsewhere, unless it is set; eval mode is on."""
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
    """A quantized model computes the same as if mlx-lm had loaded it."""
    path = make_model_folder(tmp_path / "model", quantize={"group_size": 32, "bits": 4})
    model = load_inference(str(path), CPU)
    theirs, _ = mlx_lm.load(str(path))
    assert model.module.model.layers[0].self_attn.q_proj.bits == 4
    assert mx.allclose(model.module(TOKENS), theirs(TOKENS), rtol=1e-4, atol=1e-4)
