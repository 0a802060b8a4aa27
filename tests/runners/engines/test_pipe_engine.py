"""A second engine, a process of its own over a pipe: all that a run needs of an engine is its protocol."""

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from runners.engines.engine import Request, Weights
from runners.engines.local import LocalEngine
from runners.engines.rollouts import generate, seeds_of
from runners.training import learner
from tests.support.pipe_engine import PipeEngine
from tests.support.resuming import outcome
from tests.support.runs.talking_runs import talking_run
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_states import load

SAMPLING = g.Sampling(num_generations=2, max_new_tokens=9)


def test_a_process_over_a_pipe_takes_part_in_training_with_environments(tmp_path, monkeypatch):
    """Conversations, updates and evaluations give the same run, bit for bit on a CPU; the process is idle
    afterwards."""
    settings = ["eval.samples=2", "eval.every=1"]
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    here = talking_run(folders[0], monkeypatch, *settings)
    engines = []

    def made(*_):
        engines.append(PipeEngine("embedded"))
        return engines[-1]

    monkeypatch.setattr(learner, "LocalEngine", made)
    there = talking_run(folders[1], monkeypatch, *settings)
    assert [engine.version for engine in engines] == [2, 2]
    assert [engine.close() for engine in engines] == [True, True]
    found = outcome(there)
    assert any(record.get("turns/max", 0) > 1 for record in found["log"])
    if mx.default_device() == mx.cpu:
        assert found == outcome(here)


@pytest.fixture(name="engines")
def _engines(tmp_path):
    """An engine here and one there, with the same weights."""
    folder = make_model_folder(tmp_path / "llama", "llama")
    policy = g.Policy.from_module(load(folder).module)
    here, there = LocalEngine(), PipeEngine(folder)
    for engine in (here, there):
        engine.load(Weights(policy, policy.params, 3))
    yield here, there
    assert there.close()


def test_what_crosses_the_pipe_is_plain(engines):
    """Groups, streams, continued and cancelled requests, and errors are the same as in this process."""
    (seeds,) = seeds_of(mx.random.key(1), [0], SAMPLING)
    request = Request(prompt=(5, 9, 11), seeds=seeds)
    seen = []
    for engine in engines:
        rollout = generate(engine, [request], SAMPLING)
        one = attrs.evolve(request, seeds=seeds[:1], keep=True)
        ticket = engine.submit(one, SAMPLING)
        said = [token.id for token in engine.tokens(ticket)]
        longer = attrs.evolve(one, prompt=(5, 9, 11, *said, 7), continues=ticket)
        next_ticket = engine.submit(longer, SAMPLING)
        again = [(token.id, token.prompt_tokens) for token in engine.tokens(next_ticket)]
        engine.cancel(next_ticket)
        endless = engine.submit(one, attrs.evolve(SAMPLING, max_new_tokens=10_000))
        engine.cancel(endless)
        ((row,),) = engine.collect().values()
        with pytest.raises(ValueError, match="token id"):
            generate(engine, [attrs.evolve(request, prompt=(10**6,))], SAMPLING)
        facts = (engine.version, engine.rows, row.finish)
        seen.append((rollout.completions(), rollout.logp_bt.tolist(), said, again, facts))
    assert seen[0] == seen[1]
    assert seen[0][3][0][1] < len(longer.prompt) and facts[-1] == "cancelled"
