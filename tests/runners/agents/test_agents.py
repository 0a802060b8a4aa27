"""Training from programs that own their loop: rows, masks and gradients, limits, faults."""

import pytest

from tests.support.agents import ONE_CALL, TALKS, agent_run
from tests.support.tiny_runs import BY_LETTERS, ran, small

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
PLAIN = {"data": {"source": "", "nudge": "", "system_prompt": ""}, "answer": {"form": "none"}}


def weights(run) -> bytes:
    """The final model of a run."""
    return (run.result.folder / "final/model.safetensors").read_bytes()
