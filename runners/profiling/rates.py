"""This machine's best rates through MLX, measured in a second: products, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import mlx.core as mx

_REPEATS = 5


@attrs.frozen
class MachineRates:
    """Rates, for the dtype that they were measured in."""

    matmul: float  # FLOP/s of a large square product
    read: float  # bytes/s at which a product with one vector reads its matrix


def measure_rates(dtype: mx.Dtype) -> MachineRates:
    """The best of a few repeats, on the default device."""
    on_gpu = mx.default_device().type != mx.DeviceType.cpu
    side, wide = (8192, 16384) if on_gpu else (1024, 4096)
    a_nn = mx.random.normal((side, side), key=mx.random.key(0)).astype(dtype)
    w_nn = mx.random.normal((wide, wide), key=mx.random.key(1)).astype(dtype)
    x_n1 = mx.ones((wide, 1), dtype)
    mx.eval(a_nn, w_nn, x_n1)
    return MachineRates(
        matmul=2 * side**3 / _seconds(lambda: a_nn @ a_nn), read=w_nn.nbytes / _seconds(lambda: w_nn @ x_n1)
    )


def _seconds(call: Callable[[], mx.array]) -> float:
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        mx.eval(call())
        best = min(best, time.perf_counter() - started)
    return best
