"""The CUDA kernels of x / rms(x) against NumPy in float64; on any machine, what they are asked for."""

import re

import mlx.core as mx
import numpy as np
import pytest

from grpo_fn.backends.cuda import kernels as cuda_kernels
from grpo_fn.backends.cuda import norm_kernels
from grpo_fn.backends.cuda.norm_kernels import takes_rows, unit_rms
from tests.support.kernels.row_kernels import float64

EPS = 1e-5
needs_cuda = pytest.mark.skipif(not takes_rows(mx.zeros((1, 32))), reason="needs CUDA")


def specified(x, g):
    """x / rms(x), and its gradient for the cotangent g; float64, along the last axis."""
    inverse = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)
    normal = x * inverse
    return normal, (g - normal * (g * normal).mean(axis=-1, keepdims=True)) * inverse


def make_arrays(shape, dtype=mx.float32):
    """x and a cotangent."""
    keys = mx.random.split(mx.random.key(shape[-1]), 2)
    return [(3 * mx.random.normal(shape, key=key)).astype(dtype) for key in keys]


def value_and_gradient(x, g):
    """What `unit_rms` gives, forward and backward."""
    (value,), (gradient,) = mx.vjp(lambda x: unit_rms(x, None, EPS), [x], [g])
    return value, gradient


@needs_cuda
@pytest.mark.parametrize("width", [32, 64, 96, 128, 1280, 4096])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [False, True])
def test_values_and_gradients(width, dtype, heads):
    """Rows in several sizes, as many as fill no whole block; heads that lie behind positions."""
    arrays = make_arrays((2, 5, 3, width) if heads else (7, width), dtype)
    if heads:
        arrays = [a.swapaxes(1, 2) for a in arrays]
    tolerance = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    for found, wanted in zip(value_and_gradient(*arrays), specified(*map(float64, arrays)), strict=True):
        assert found.dtype == dtype and found.shape == arrays[0].shape
        assert np.abs(float64(found) - wanted).max() <= tolerance * np.abs(wanted).max()


class Stand:
    """Stands in for both kernels where nothing is compiled."""

    def __init__(self, name, inputs, outputs, source):
        self.backward = name == "unit_rms_gradient"
        assert inputs == (("x", "g") if self.backward else ("x",)) and outputs == ("out",)
        assert float(re.search(r"\+ \((\S+)f\)\)", source)[1]) == EPS

    def __call__(self, *, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        options = dict(template)
        rows = inputs[0].size // options["D"]
        assert options["D"] == inputs[0].shape[-1] and options["T"] == inputs[0].dtype
        assert grid[0] == 32 * rows and grid[0] % threadgroup[0] == 0
        assert threadgroup[0] == 32 * options["WARPS"]
        x, g = float64(inputs[0]), float64(inputs[-1])
        found = specified(x, g)[1 if self.backward else 0]
        return [mx.array(found.astype(np.float32)).reshape(output_shapes[0]).astype(output_dtypes[0])]


@pytest.mark.parametrize("shape", [(7, 32), (2, 3, 32), (2, 3, 5, 64), (2, 4, 1, 64)])
def test_every_row_along_the_last_axis(shape, monkeypatch):
    """Any number of axes; the result lies as the input does."""
    monkeypatch.setattr(norm_kernels, "cuda_kernel", Stand)
    arrays = make_arrays(shape)
    for found, wanted in zip(value_and_gradient(*arrays), specified(*map(float64, arrays)), strict=True):
        assert np.allclose(float64(found), wanted, atol=1e-5)


def test_no_kernel_on_a_cpu(monkeypatch):
    """Other devices, widths and dtypes take MLX's function."""
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: True)
    assert takes_rows(mx.zeros((2, 128))) and not takes_rows(mx.zeros((2, 128)), mx.ones((128,)))
    assert not takes_rows(mx.zeros((2, 100)))
    assert not takes_rows(mx.zeros((2, 8192)))
    assert not takes_rows(mx.zeros((0, 128)))
    assert not takes_rows(mx.zeros((2, 128), mx.int32))
    monkeypatch.setattr(cuda_kernels, "has_cuda", lambda: False)
    assert not takes_rows(mx.zeros((2, 128)))
