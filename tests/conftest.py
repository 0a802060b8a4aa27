"""Strict globals of the test suite: warnings are errors, randomness is fixed, Hypothesis has its profiles."""

import gc
import os
import signal
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

from runners.machine.programs.gpu_programs import keep_programs
from runners.machine.startup import load_blas

# On CUDA, float32 products in float32: what compares two ways to compute looks for less than TF32's rounding.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("GRPO_FN_TORCH", "1")  # tests compare with models of transformers
if "PYTEST_XDIST_WORKER" in os.environ:
    # A process a core: between small products a second BLAS thread spins, on the core of another process.
    for _threads in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_threads, "1")
# OpenBLAS only takes effect when it is loaded before the first import of mlx.core.
load_blas()

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
for _name, _examples in (("ci", 25), ("campaign", 300)):
    settings.register_profile(_name, derandomize=True, database=None, max_examples=_examples, **_COMMON)
settings.register_profile("dev", max_examples=100, **_COMMON)
# `ci`, the default, draws the same examples every time, and `campaign`, of `make campaigns`, many more;
# HYPOTHESIS_PROFILE=dev looks for new ones.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure():
    """Programs for CUDA are this process's own: MLX writes them in place, and tests run side by side."""
    import mlx.core as mx

    if mx.cuda.is_available():
        keep_programs(version("mlx"), str(mx.device_info()["architecture"]))


@pytest.fixture(autouse=True, scope="session")
def _hangups():
    """SIGHUP as a terminal sends it, also where the tests run under nohup: their processes inherit this."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """What runs measure goes into a folder of the session: nothing comes from the user's, or goes there.

    All processes of a session share it: a model or a tokenizer is checked once.
    """
    folder = tmp_path_factory.getbasetemp()
    session = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_FN_CACHE", str(session / "session-cache"))
        yield


def pytest_collection_finish(session):
    """Modules and tests stay to the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()
