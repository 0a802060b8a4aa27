"""The whole source of a CUDA kernel; where NVRTC is installed, that it takes each."""

import mlx.core as mx
import pytest

from grpo_fn.backends.cuda import kernels, logit_kernels, rounding_kernel
from grpo_fn.backends.cuda.decoding import prefix_attention
from grpo_fn.backends.cuda.kernels import CudaKernel

needs_nvrtc = pytest.mark.skipif(kernels._nvrtc() is None, reason="needs CUDA's compiler")


def test_a_source_has_types_constants_and_sizes():
    """In the order in which MLX hands them over: inputs, outputs, numbers."""
    kernel = CudaKernel(
        "twice", ("x", "y"), ("out",), "out[0] = T(y[0] * x_shape[1] + x_shape[0] + shape[0]);"
    )
    template = [("T", mx.bfloat16), ("N", 4), ("BACK", True)]
    name, source = kernel.source(template, [mx.bfloat16, mx.int32], [mx.float32], 32)
    head, body = source[source.index("extern") :].split("{", 1)
    wanted = "const bfloat16* x, const int* y, float* out, const int x_shape_1, const int x_shape_0) "
    assert head == f'extern "C" __global__ void __launch_bounds__(32) {name}({wanted}'
    lines = body.split("\n")[1:4]
    assert lines == ["using T = bfloat16;", "constexpr int N = 4;", "constexpr bool BACK = true;"]
    assert "x_shape_1 + x_shape_0 + shape[0]" in body


def test_each_source_has_a_name_of_its_own():
    """Types, constants and text count: MLX keeps programs by their names."""

    def name(text="out[0] = x[0];", n=1, dtype=mx.float32, threads=32):
        return CudaKernel("copy", ("x",), ("out",), text).source([("N", n)], [dtype], [dtype], threads)[0]

    names = {name(), name(n=2), name(dtype=mx.float16), name(text="out[0] = x[1];")}
    names |= {name(threads=64)}
    assert len(names) == 5 and name() in names


def test_a_kernel_is_launched_with_sizes_and_compiled_once(monkeypatch):
    launched, compiled = [], []
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setattr(kernels, "compiled_source", lambda *given: compiled.append(given) or b"code")
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **given: launched.append(given) or ["out"])
    kernel = CudaKernel("sum", ("x",), ("out",), "out[0] = x_shape[0] * x_shape[2];")
    given = {"template": [("T", mx.float32)], "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    for rows in (3, 5):
        x = mx.zeros((rows, 2, 7))
        found = kernel(inputs=[x], output_shapes=[(1,)], output_dtypes=[mx.float32], **given)
        assert found == ["out"] and launched[-1]["scalars"] == [rows, 7]
    assert len(compiled) == 1 and compiled[0][1] == "sm_90" and launched[0]["ensure_row_contiguous"]


@needs_nvrtc
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_nvrtc_takes_every_kernel(dtype, monkeypatch):
    """Without a GPU, too: it compiles for the architecture that is given."""
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    launched = []

    def launch(**given):
        launched.append(given)
        return [mx.zeros(s, d) for s, d in zip(given["output_shapes"], given["output_dtypes"], strict=True)]

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    rows = mx.ones((4, 64), dtype)
    targets, ones = mx.zeros((4,), mx.int32), mx.ones((4,))
    logit_kernels.row_logprobs(rows, targets, (1.0, None), 1.0)
    logit_kernels.row_gradients(rows, targets, (ones, ones), (ones, ones), (0.5, 30.0), 1.0)
    queries, new, own = (
        mx.ones((6, 4, 1, 64), dtype),
        mx.ones((6, 2, 1, 64), dtype),
        mx.ones((6, 2, 8, 64), dtype),
    )
    numbers = mx.zeros((6,), mx.int32), mx.zeros((2,), mx.int32), mx.ones((6,), mx.int32)
    prefix_attention.append_and_attend(queries, new, new, own[:2], own[:2], own, own, *numbers, 0.1)
    carry = mx.zeros((2,), mx.int32), mx.zeros((1, 96), mx.uint32), mx.ones((1, 96, 96), mx.bfloat16)
    rounding_kernel.round_columns(4, 32)(
        mx.ones((2, 3, 96), dtype), mx.ones((2, 3, 3)), mx.ones((2, 3, 3)), *carry
    )
    rounding_kernel.group_ranges(4, 64, dtype, (1.0, 0.9))(mx.ones((2, 3, 128), dtype), mx.ones((2, 128)))
    assert len(launched) == 5 and all(len(given["compiled_source"]) > 1000 for given in launched)


@needs_nvrtc
def test_a_source_that_is_refused_says_why():
    with pytest.raises(RuntimeError, match="undefined_name"):
        kernels.compiled_source('extern "C" __global__ void f() { undefined_name(); }', "sm_90")
