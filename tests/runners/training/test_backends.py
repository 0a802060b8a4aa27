"""Models whose gradient is known to be wrong on a backend are refused there, and only there."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runners.errors import UserError
from runners.machine.startup import Platform
from runners.training.learner import check_backend


@pytest.mark.parametrize(
    ("family", "backend"),
    [("gpt_oss", "cuda"), ("gpt_oss", "cpu"), ("gpt_oss", "metal"), ("qwen3", "cuda")],
)
def test_only_a_model_with_a_wrong_gradient_is_refused(family, backend):
    """The message names the model, its family and the backend."""
    loaded: Any = SimpleNamespace(path=Path("a-model"), config={"model_type": family})
    line = "a-model: gradients of gpt_oss are wrong with MLX's cuda backend"
    wrong = (family, backend) == ("gpt_oss", "cuda")
    with pytest.raises(UserError, match=line) if wrong else nullcontext():
        check_backend(loaded, Platform(backend))
