"""Evaluations during a run."""

from runners.config.loading import load_config
from runners.engines.local import LocalEngine
from runners.training.train import run_training
from tests.support.tiny_runs import Notes, small

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
    path, notes = tmp_path / "train.toml", Notes()
    path.write_text(small(run={"name": "r", "output_dir": str(tmp_path)}, **SETTINGS))
    assert run_training(load_config(str(path)), report=notes).first_em is not None
    assert sum(line.startswith("out of memory") for line in notes.lines) == 1
