"""The library's own exp and the functions built on it, compared with NumPy in float64 and MLX's gradients."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_fn.backends import composed, disabled, find
from grpo_fn.backends.cpu import elementwise as fast


def grid():
    """Finite float32 numbers over the range in which exp neither overflows nor underflows."""
    return np.linspace(-87, 88, 200_001).astype(np.float32)


def test_exp_is_exact_to_two_roundings():
    """Relative error at most 2e-7 over the whole range, compiled or not."""
    x = grid()
    wanted = np.exp(x.astype(np.float64))
    for function in (composed.exp, mx.compile(composed.exp)):
        assert np.abs(np.array(function(mx.array(x))) / wanted - 1).max() < 2e-7


def test_exp_at_the_ends():
    """0 far below, infinity far above, NaN for NaN, 1 at 0; bfloat16 is left to MLX."""
    x = mx.array([0.5, -1.0], mx.bfloat16)
    assert composed.exp(x).dtype == composed.softmax(x).dtype == composed.swiglu(x, x).dtype == x.dtype
    assert find("exp", x) is None
    found: Any = composed.exp(mx.array([-mx.inf, -1e30, -200.0, 0.0, 90.0, mx.inf, mx.nan])).tolist()
    assert found[:4] == [0, 0, 0, 1] and found[4:6] == [mx.inf, mx.inf] and np.isnan(found[6])


@given(st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=9))
def test_softmax_and_its_sums_are_numpy_s(values):
    """Both agree with float64, also if one logit dwarfs the others."""
    z = np.array(values, np.float64)
    raised = np.exp(z - z.max())
    assert np.allclose(np.array(composed.softmax(mx.array(values))), raised / raised.sum(), atol=1e-6)
    sums, shares = composed.softmax_sums(mx.array(values)), raised / raised.sum()
    assert sums.log_total.item() == pytest.approx(np.log(raised.sum()), rel=1e-6, abs=1e-6)
    assert sums.entropy.item() == pytest.approx(
        -(shares * (z - z.max())).sum() + np.log(raised.sum()), abs=1e-5
    )


@pytest.mark.parametrize("name", ["exp", "softmax"])
def test_gradients_of_one_argument(name):
    """The hand-written gradient is that of MLX's function of the same name."""
    x = mx.random.normal((4, 7), key=mx.random.key(0))
    weights = mx.random.normal((4, 7), key=mx.random.key(1))
    theirs = {"exp": mx.exp, "softmax": lambda x: mx.softmax(x, axis=-1)}

    def gradient(function):
        return mx.grad(lambda x: (function(x) * weights).sum())(x)

    assert mx.allclose(gradient(getattr(composed, name)), gradient(theirs[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("off", [(), ("swiglu", "swiglu_gradient")], ids=["backend", "composed"])
def test_swiglu_and_its_gradient(off):
    """silu(g)·x and both derivatives, at gates from −30 to 30, compiled or composed."""
    gate = mx.linspace(-30, 30, 401)
    x = mx.random.normal((401,), key=mx.random.key(0))

    def results(function):
        def loss(gate, x):
            found = function(gate, x)
            return found.square().sum(), found

        (_, found), gradients = mx.value_and_grad(loss, argnums=(0, 1))(gate, x)
        return found, *gradients

    with disabled(*off):
        for found, wanted in zip(
            results(composed.swiglu), results(lambda gate, x: nn.silu(gate) * x), strict=True
        ):
            assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_swiglu_at_the_ends(compiled):
    """0 far below, gate · x far above, NaN for NaN; e^{-gate} has the bits of `exp` of -gate."""
    found: Any = (mx.compile(fast.swiglu) if compiled else fast.swiglu)(
        mx.array([-1e30, -200.0, 0.0, 200.0, 1e30, mx.nan]), mx.array([2.0] * 6)
    ).tolist()
    assert found[:4] == [0, 0, 0, 400] and found[4] == pytest.approx(2e30) and np.isnan(found[5])
    gate = mx.array(grid())
    wanted = gate * 3 / (1 + fast.exp(-gate))
    assert mx.array_equal(fast.swiglu(gate, mx.full(gate.shape, 3.0)), wanted).item()


COMPILED_GATE = """
import grpo_fn, mlx.core as mx
mx.set_default_device(mx.cpu)
from grpo_fn.backends.cpu.elementwise import swiglu, swiglu_gradient
def gate(gate, x, cotangent):
    return swiglu(gate, x), *swiglu_gradient(gate, x, cotangent)
mx.eval(mx.compile(gate)(*mx.random.normal((3, 8, 16))))
"""


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux")
def test_no_program_of_a_compiled_gate_reads_with_strides(tmp_path):
    """Strided programs compute one number at a time; MLX makes them for long chains."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", COMPILED_GATE], env=environment, check=True)
    folder = tmp_path / "mlx" / importlib.metadata.version("mlx") / "cpu"
    programs = [(path.name, path.read_text()) for path in folder.glob("*.cpp")]
    assert programs and not [name for name, text in programs if "_strides[" in text]


def test_a_first_use_inside_of_grad_fixes_no_shape():
    """Shapes that are first used inside a gradient are not confused with each other."""
    # A function of its own, as mx.compile knows functions by identity.
    fused = fast._fused(lambda x: (fast._rounded(x, 1.0), fast._power(x)))

    def shapes_in_grad(shape):
        found = []

        def inner(x):
            found.extend(part.shape for part in fused(mx.stop_gradient(x) * 1))
            return x.sum()

        mx.grad(inner)(mx.zeros(shape))
        return found

    for shape in [(1, 2), (1, 1), (3, 1), (1, 4), (2, 1, 3), (1, 1, 1)]:
        assert shapes_in_grad(shape) == [shape, shape]


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (3, 1, 6)])
def test_rms_norm_is_mlx_s(shape):
    """Values and all gradients, compiled or not; a row of zeros stays finite."""
    x = mx.random.normal(shape, key=mx.random.key(0))
    x = mx.where(mx.arange(x.size // 6).reshape(*shape[:-1], 1) == 1, 0, x)
    weight = mx.random.normal((6,), key=mx.random.key(1))
    weights = mx.random.normal(shape, key=mx.random.key(2))

    def of(norm):
        return mx.value_and_grad(lambda x, w: (norm(x, w, 1e-5) * weights).sum(), argnums=(0, 1))

    wanted, wanted_gradients = of(mx.fast.rms_norm)(x, weight)
    for function in (of(composed.rms_norm), mx.compile(of(composed.rms_norm))):
        found, gradients = function(x, weight)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
        for ours, theirs in zip(gradients, wanted_gradients, strict=True):
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5).item()
