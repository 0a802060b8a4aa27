"""Models whose gradient was measured as wrong on a backend are refused there, and only there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runners.errors import UserError
from runners.machine.startup import Platform
from runners.training.learner import check_backend


def loaded(family: str) -> Any:
    """What is asked of a loaded model."""
    return SimpleNamespace(path=Path("a-model"), config={"model_type": family})


def test_a_model_with_a_wrong_gradient_is_refused():
    """The line names the model, its family and the backend."""
    with pytest.raises(UserError, match="a-model: gradients of gpt_oss are wrong with MLX's cuda backend"):
        check_backend(loaded("gpt_oss"), Platform("cuda"))


@pytest.mark.parametrize(("family", "backend"), [("gpt_oss", "cpu"), ("gpt_oss", "metal"), ("qwen3", "cuda")])
def test_other_models_and_backends_are_not(family, backend):
    """Nothing is raised."""
    check_backend(loaded(family), Platform(backend))
