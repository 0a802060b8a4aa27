"""Evaluations during a run."""

from runners.engines.local import LocalEngine
from tests.support.tiny_runs import ran, small

SETTINGS = {"optim": {"max_steps": 1, "batch_size": 2}, "eval": {"samples": 12, "at_start": True}}


def test_an_evaluation_that_runs_out_of_memory_is_repeated_and_says_so(tmp_path, monkeypatch):
    """As a rollout does: the line is the evaluation's."""
    sampled, tries = LocalEngine._sampled, []

    def short(engine, *rest):
        tries.append(engine)
        if len(tries) == 1:
            raise RuntimeError("out of memory")
        return sampled(engine, *rest)

    monkeypatch.setattr(LocalEngine, "_sampled", short)
    found = ran(tmp_path, text=small(**SETTINGS))
    assert found.result.first_em is not None
    assert sum(line.startswith("out of memory") for line in found.notes) == 1
