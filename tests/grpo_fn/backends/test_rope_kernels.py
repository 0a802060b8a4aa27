"""The CUDA kernel of rotary embeddings against MLX's own; on any machine, where it is used."""

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.backends.cuda import kernels as cuda_kernels
from grpo_fn.backends.cuda.rope_kernels import rope, takes_heads
from tests.support.kernels.row_kernels import float64

needs_cuda = pytest.mark.skipif(not takes_heads(mx.zeros((1, 1, 2, 32)), 32, 0), reason="needs CUDA")


def turned(x, periods, back=False):
    """In NumPy float64: the halves of each head turned by position over period."""
    half = x.shape[-1] // 2
    if isinstance(periods, float):
        periods = periods ** (np.arange(half) / half)
    angles = np.arange(x.shape[2])[:, None] / np.asarray(periods, np.float64) * (-1 if back else 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1
    )


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [32, 64, 128])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("behind", [False, True])
def test_values_and_gradients(dtype, dims, given, behind):
    """Both ways to give the periods, negative ones too; heads that lie behind positions and before them."""
    keys = mx.random.split(mx.random.key(dims), 2)
    shape = (2, 65, 3, dims) if behind else (2, 3, 65, dims)
    x, g = (mx.random.normal(shape, key=key).astype(dtype) for key in keys)
    if behind:
        x, g = x.swapaxes(1, 2), g.swapaxes(1, 2)
    periods = -mx.exp(mx.arange(dims // 2) * (9.2 / (dims // 2))) if given else 10000.0
    in_numpy = float64(periods) if given else periods
    (value,), (gradient,) = mx.vjp(lambda x: rope(x, periods), [x], [g])
    tolerance = {mx.float32: 5e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]
    assert value.dtype == gradient.dtype == dtype
    assert np.abs(float64(value) - turned(float64(x), in_numpy)).max() < tolerance
    assert np.abs(float64(gradient) - turned(float64(g), in_numpy, back=True)).max() < tolerance


def test_what_is_specified_is_mlx_s():
    """The NumPy above agrees with `mx.fast.rope`, with a base and with periods."""
    x = mx.random.normal((2, 3, 9, 32), key=mx.random.key(0))
    base = mx.fast.rope(x, 32, traditional=False, base=10000.0, scale=1.0, offset=0)
    assert np.abs(float64(base) - turned(float64(x), 10000.0)).max() < 1e-4
    periods = -mx.exp(mx.arange(16) * 0.3)
    given = mx.fast.rope(x, 32, traditional=False, base=None, scale=1.0, offset=0, freqs=periods)
    assert np.abs(float64(given) - turned(float64(x), float64(periods))).max() < 1e-4


def test_where_it_is_used(monkeypatch):
    """Whole sequences from their first position, heads that turn whole; all else is MLX's."""
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: True)
    x = mx.zeros((1, 2, 5, 32))
    assert takes_heads(x, 32, 0)
    assert not takes_heads(x, 16, 0)
    assert not takes_heads(x, 32, 3)
    assert not takes_heads(x, 32, mx.array(0))
    assert not takes_heads(x[:, :, :1], 32, 0)
    assert not takes_heads(x.astype(mx.int32), 32, 0)
    assert not takes_heads(mx.zeros((1, 2, 5, 12), mx.float16), 12, 0)
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: False)
    assert not takes_heads(x, 32, 0)
