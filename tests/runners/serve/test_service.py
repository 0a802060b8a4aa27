"""The service: weights that change while it serves, turns begun together, room, faults, the end."""

import threading

import attrs
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.trees import map_arrays
from runners.engines.engine import Weights
from runners.engines.local import LocalEngine
from runners.serve.service import Limits, Service
from runners.serve.sessions import Refused
from tests.runners.serve.test_wire import CHAT, MESSAGES, recomputed
from tests.support.serving import Client, ScriptedEngine, served, serving, soon
from tests.support.tiny_states import load


def turn_of(session, prompt=(5, 6, 7), most=20, *, seed=None, hears=True, **distribution):
    """A turn, and the list of what its listener receives."""
    sampling = g.Sampling(max_new_tokens=most, **distribution)
    turn = session.begin(prompt, None, sampling, seed)
    heard = []
    turn.end = heard.append
    if hears:
        turn.hear = lambda tokens, logp: heard.extend(tokens)
    return turn, heard


@pytest.fixture(scope="module")
def policy():
    """The same model, with weights that change."""
    return g.Policy.from_module(load("embedded").module)


def of_version(policy, version):
    """Weights that depend on the version."""
    params = map_arrays(lambda array: array * (1 + 0.02 * version), policy.params)
    return Weights(policy, params, version)


@pytest.mark.parametrize("interrupt", [True, False])
def test_weights_that_are_loaded_while_rows_decode(loaded, policy, interrupt):
    """With `interrupt`, rows continue with the new weights and record both versions; otherwise, they
    finish with the old ones."""
    engine = LocalEngine(decoding=g.Decoding(check_every=1))
    weights = [of_version(policy, version) for version in (0, 1)]
    engine.load(weights[0])
    service = Service(engine, served(loaded))
    turn, heard = turn_of(service.open(seed=(1, 2)), most=30)
    service.submit([turn])
    service.run(lambda: len(heard) >= 6)
    begun = len(heard)
    service.load(weights[1], interrupt=interrupt)
    service.run(lambda: service.idle)
    row = heard.pop()
    assert list(row.tokens) == heard == turn.row.talk.tokens and len(heard) == 30
    if not interrupt:
        assert row.versions == ((0, 30),)
        return
    (first, drawn), (second, others) = row.versions
    assert (first, second, drawn + others) == (0, 1, 30) and begun <= drawn < 30
    for each, part in zip(weights, (slice(0, drawn), slice(drawn, 30)), strict=True):
        with policy.sampling(each.params, 1) as module:
            model = attrs.evolve(loaded, module=module)
            expected = recomputed(model, (5, 6, 7, *row.tokens[: part.start]), row.tokens[part])
        np.testing.assert_allclose(row.logp[part], expected, atol=1e-4)


def test_turns_begun_together_do_not_depend_on_when_they_come(loaded, policy):
    """The rows are bit-identical in any order of the clients' calls."""

    def rows(order):
        engine = LocalEngine()
        engine.load(of_version(policy, 0))
        service = Service(engine, served(loaded))
        sessions = [service.open(seed=(7, n)) for n in range(4)]
        turns = [turn_of(session, (5, 6, 7, n), hears=False) for n, session in enumerate(sessions)]

        def call():
            for n in order:
                service.submit([turns[n][0]])

        client = threading.Thread(target=call)
        client.start()
        service.run(lambda: all(heard for _, heard in turns), together=lambda: 4)
        client.join()
        return [(row.tokens, row.logp) for _, (row,) in turns]

    assert rows([0, 1, 2, 3]) == rows([3, 1, 0, 2])


def test_a_call_beyond_the_room_is_refused_as_a_whole(loaded):
    """The call gets 429 with Retry-After, none of its turns starts, and later calls are accepted."""
    engine = ScriptedEngine(loaded.tokenizer, ["1+" * 40] * 3)
    with serving(engine, served(loaded), limits=Limits(turns=2)) as client:
        answer = client.http.post(CHAT, json={"messages": MESSAGES, "n": 3})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert client.session.rows == []
        assert len(client.chat("?", n=2)["choices"]) == 2


def test_a_service_that_ends_refuses_new_turns_and_finishes_the_others(loaded):
    """New calls and /health get 503; the running call gets its answer."""
    engine = ScriptedEngine(loaded.tokenizer, ["1+" * 100])
    with serving(engine, served(loaded)) as client:
        found = []
        caller = threading.Thread(target=lambda: found.append(client.post(CHAT, {"messages": MESSAGES})))
        caller.start()
        assert soon(lambda: engine.jobs)
        client.service.draining = True
        other = Client(client.server)
        assert other.post(CHAT, {"messages": MESSAGES})[0] == 503
        assert other.http.get("/health").status_code == 503
        caller.join()
        assert found[0][0] == 200


def test_an_error_of_the_engine_ends_its_turns_and_no_others(loaded):
    """The decoding call gets 500; the next call is answered."""

    class Faulty(ScriptedEngine):
        """Fails once."""

        error = RuntimeError("a kernel failed")

        def collect(self, least=1, **options):
            if self.error and self.jobs:
                self.failed, self.error = (self.error, set(self.jobs)), None
                raise RuntimeError
            return super().collect(least, **options)

        failed = (None, set())

        def peek(self, ticket, start=0):
            if ticket in self.failed[1]:
                raise self.failed[0]
            return super().peek(ticket, start)

        def cancel(self, ticket):
            super().cancel(ticket)
            if ticket in self.failed[1]:
                del self.jobs[ticket]

    with serving(Faulty(loaded.tokenizer, ["yes", "no"]), served(loaded)) as client:
        status, answer = client.post(CHAT, {"messages": MESSAGES})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert client.chat("?")["choices"][0]["message"]["content"] == "no"
        assert len(client.session.rows) == 1


def test_a_session_that_is_closed_ends_its_turns(loaded):
    """After the agent's process has ended, its running calls end, and only finished turns remain in its
    rows."""
    service = Service(ScriptedEngine(loaded.tokenizer, ["yes", "1+" * 100]), served(loaded))
    session, other = service.open(), service.open()
    first, heard = turn_of(session)
    service.submit([first])
    service.run(lambda: service.idle)
    rows = list(session.rows)
    second, faults = turn_of(session)
    service.submit([second])
    service.run(lambda: len(service.engine.jobs) > 0)
    service.close(session)
    late, later = turn_of(other)
    assert service.session(session.key) is None and service.session(other.key) is other
    service.submit([late])
    service.cancel(late)
    service.run(lambda: service.idle)
    assert isinstance(faults[-1], Refused) and isinstance(later[-1], Refused)
    assert session.rows == rows and len(heard[-1].tokens) > 0
    with pytest.raises(Refused):
        session.count()


def test_the_room_of_turns_that_end_is_free_again(loaded):
    """300 turns, finished or cancelled, pass a service with room for 2."""
    service = Service(ScriptedEngine(loaded.tokenizer, ["1"] * 400), served(loaded), Limits(turns=2))
    session = service.open(records=False)
    for number in range(300):
        turn, heard = turn_of(session)
        service.submit([turn])
        if number % 3 == 0:
            service.cancel(turn)
        service.run(lambda heard=heard: bool(heard) and not isinstance(heard[-1], int))
    turns = [turn_of(session)[0] for _ in range(3)]
    with pytest.raises(Refused):
        service.submit(turns)
    service.submit(turns[:2])
