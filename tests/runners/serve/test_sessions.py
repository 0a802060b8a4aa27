"""Calls as rows: what continues one, what begins one, and what leaves no trace."""

from contextlib import ExitStack

import httpx2
import pytest

import grpo_fn as g
from runners.engines.engine import Weights
from runners.serve.sessions import Refused, Session, derived_seed
from tests.runners.serve.test_wire import CHAT, GENERATE, IDS, QUESTION
from tests.support.serving import Client, Recorded, ScriptedEngine, conversation, served, serving, soon

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'


@pytest.fixture
def client(loaded):
    """A client with a session that records its rows."""
    with serving(loaded.engine, served(loaded)) as client:
        session = client.service.open()
        client = Client(client.server, session.key)
        client.session = session
        yield client
        client.service.close(session)


@pytest.fixture
def scripted(loaded):
    """Starts a server whose model says these texts; the client's session records its rows."""
    with ExitStack() as opened:

        def start(*texts):
            engine = ScriptedEngine(loaded.tokenizer, texts)
            server = opened.enter_context(serving(engine, served(loaded))).server
            session = server.service.open()
            client = Client(server, session.key)
            client.engine = engine
            client.session = session
            return client

        yield start


def said(answer):
    """The text of a reply."""
    return answer["choices"][0]["message"]["content"]


def everything(answer):
    """The ids of a prompt and its reply."""
    return (*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"])


def test_a_chat_that_goes_on_continues_its_row(client):
    """The next prompt starts with the exact ids of the last prompt and reply; one row contains both turns."""
    first = client.chat(QUESTION, max_tokens=40, **IDS)
    second = client.chat(QUESTION, said(first), "And then?", max_tokens=30, **IDS)
    prompt = tuple(second["prompt_token_ids"])
    assert prompt[: len(everything(first))] == everything(first)
    (row,) = client.session.rows
    assert row.ids == everything(second)
    sampled = [token for token, mine in zip(row.talk.tokens, row.talk.sampled, strict=True) if mine]
    assert sampled == [*first["choices"][0]["token_ids"], *second["choices"][0]["token_ids"]]
    logp = [logp for logp, mine in zip(row.talk.logp, row.talk.sampled, strict=True) if mine]
    entries = [entry for each in (first, second) for entry in each["choices"][0]["logprobs"]["content"]]
    assert logp == [entry["logprob"] for entry in entries]


def test_a_continued_row_computes_only_what_is_new(loaded):
    """The engine keeps the caches of a row's last turn."""
    engine = Recorded(loaded.engine)
    with serving(engine, served(loaded)) as client:
        first = client.chat(QUESTION, max_tokens=40, **IDS)
        second = {"messages": conversation(QUESTION, said(first), "And then?"), "max_tokens": 5, **IDS}
        events = client.stream(CHAT, second)
    new = len(events[0]["prompt_token_ids"]) - len(everything(first))
    assert engine.requests[1].continues is not None and engine.requests[1].drawn > 0
    assert engine.computed <= new + 2  # and the last token that was drawn, which no step had read


def test_a_system_prompt_of_several_chats_is_computed_once(loaded):
    """A second conversation copies the kept caches of the system prompt; its completion is the same."""
    system = {"role": "system", "content": "Anna has 3 pens and Ben has 4 pens. " * 8}
    asked = {"max_tokens": 12, "temperature": 0, **IDS}
    engine = Recorded(loaded.engine)
    answers = []
    for warm in (False, True):
        loaded.engine.load(Weights(loaded.policy, {}, 0))
        with serving(engine, served(loaded)) as client:
            if warm:
                client.post(CHAT, {"messages": [system, {"role": "user", "content": "1+1"}], **asked})
            body = {"messages": [system, {"role": "user", "content": QUESTION}], **asked}
            events = client.stream(CHAT, body)
            answers.append([token for event in events for token in event["choices"][0]["token_ids"]])
            whole = len(events[0]["prompt_token_ids"])
            assert engine.computed == whole if not warm else engine.computed < whole / 2
    assert answers[0] == answers[1]


def test_ids_that_go_on_continue_their_row(client):
    """As `renderers` sends them: the earlier prompt and reply, followed by more ids."""
    prompt = list(client.chat(QUESTION, max_tokens=3, **IDS)["prompt_token_ids"])
    first = client.post(GENERATE, {"token_ids": prompt, "sampling_params": {"max_tokens": 9}})[1]
    longer = [*prompt, *first["choices"][0]["token_ids"], 5, 6, 7]
    client.post(GENERATE, {"token_ids": longer, "sampling_params": {"max_tokens": 9}})
    rows = client.session.rows
    assert len(rows) == 2 and rows[1].ids[: len(longer)] == tuple(longer)
    sampled = rows[1].talk.sampled[len(longer) - len(prompt) - 3 :]
    assert sampled[:3] == [False] * 3 and all(sampled[3:])


def test_compaction_a_branch_and_an_edited_reply_begin_rows(client):
    """Each starts a row; a branch still starts with the exact ids of the earlier chat."""
    first = client.chat(QUESTION, max_tokens=40, **IDS)
    client.chat(QUESTION, said(first), "And then?", max_tokens=5, **IDS)
    branch = client.chat(QUESTION, said(first), "Or else?", max_tokens=5, **IDS)
    assert tuple(branch["prompt_token_ids"])[: len(everything(first))] == everything(first)
    client.chat("A summary.", max_tokens=5)
    client.chat(QUESTION, "What I did not say.", "And then?", max_tokens=5)
    client.chat(QUESTION, max_tokens=5)
    assert [len(row.talk.prompt) > 0 for row in client.session.rows] == [True] * 5


def test_completions_of_one_call_are_rows_of_their_own(client):
    """With n = 3, a chat may continue any of the three rows."""
    answer = client.chat(QUESTION, max_tokens=20, n=3, seed=8, **IDS)
    assert len(client.session.rows) == 3
    third = answer["choices"][2]
    client.chat(QUESTION, third["message"]["content"], "So?", max_tokens=5)
    assert len(client.session.rows) == 3
    assert client.session.rows[2].talk.tokens[: len(third["token_ids"])] == third["token_ids"]


def test_tool_calls_are_read_and_their_results_continue_the_row(scripted):
    """The call's arguments are a text; the result follows the exact ids of the call."""
    client = scripted(f"I add.{CALL}", "7")
    first = client.chat(QUESTION, tools=[SCHEMA], **IDS)
    (choice,) = first["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    assert call["function"] == {"name": "add", "arguments": '{"a": 3}'} and call["id"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "seven"}
    second = client.chat(QUESTION, choice["message"], result, tools=[SCHEMA], **IDS)
    assert tuple(second["prompt_token_ids"])[: len(everything(first))] == everything(first)
    assert "seven" in client.service.model.decoder.part(second["prompt_token_ids"])
    assert len(client.session.rows) == 1


def test_a_reply_that_is_a_call_alone_is_continued(scripted):
    """Its content is null; the client may send it back as null, an empty text, or not at all."""
    client = scripted(CALL, "7", CALL, "7", CALL, "7")
    for content in ({"content": None}, {}, {"content": ""}):
        first = client.chat(QUESTION, tools=[SCHEMA], **IDS)
        message = first["choices"][0]["message"]
        assert message.pop("content") is None
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seven"}
        second = client.chat(QUESTION, message | content, result, tools=[SCHEMA], **IDS)
        assert tuple(second["prompt_token_ids"])[: len(everything(first))] == everything(first)


def test_a_streamed_tool_call_comes_whole_and_not_as_text(scripted):
    """No delta contains a part of the call as content; the call's delta has an index."""
    client = scripted(f"I add.{CALL}")
    events = client.stream(CHAT, {"messages": [{"role": "user", "content": "?"}], "tools": [SCHEMA]})
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "I add."
    (call,) = deltas[-1]["tool_calls"]
    assert (call["index"], call["function"]["name"]) == (0, "add")
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (CALL, {}),
        (CALL, {"tools": [SCHEMA], "tool_choice": "none"}),
        ('<tool_call>{"name": "add", "argu</tool_call>', {"tools": [SCHEMA]}),
    ],
    ids=["no tools", "tool_choice none", "unreadable"],
)
def test_a_call_that_is_not_one_is_text(scripted, text, options):
    """The client sees the model's text."""
    assert said(scripted(text).chat("?", **options)) == text


def test_limits_of_a_session(loaded):
    """Beyond the limit of calls or tokens, a session gets 403 with a code that clients do not retry."""
    with serving(loaded.engine, served(loaded)) as client:
        for limits in ({"most_calls": 2}, {"most_tokens": 6}):
            session = client.service.open(**limits)
            guest = Client(client.server, session.key)
            for _ in range(2):
                guest.chat(QUESTION, max_tokens=3, temperature=5.0, ignore_eos=True)
            status, answer = guest.post(CHAT, {"messages": [{"role": "user", "content": "x"}]})
            assert (status, answer["error"]["code"]) == (403, "session_limit")


def test_a_session_s_own_distribution_holds_whatever_is_asked(loaded):
    """In training, a client's temperature is ignored, and the token limit applies to the whole row."""
    own = g.Sampling(max_new_tokens=30, temperature=1.5, eos_ids=loaded.eos_ids)
    with serving(loaded.engine, served(loaded)) as client:
        session = client.service.open(sampling=own, seed=(1, 2))
        guest = Client(client.server, session.key)
        texts = {said(guest.chat(QUESTION, temperature=0, max_tokens=8, seed=1)) for _ in range(6)}
        assert len(texts) > 3
        reply = said(guest.chat("1+1", max_tokens=25, temperature=0))
        longer = {"messages": conversation("1+1", reply, "7+" * 20)}
        assert guest.post(CHAT, longer)[1]["error"]["code"] == "context_length_exceeded"


def test_seeds_of_rows():
    """The first row has the session's seed; the seeds of later rows derive from it independently."""
    seeds = {derived_seed((3, 4), number) for number in range(100)}
    assert len(seeds) == 100 and derived_seed((3, 4), 0) == (3, 4)
    session = Session(key="k", seed=(3, 4))
    turns = [session.begin((1, 2), None, g.Sampling(), None) for _ in range(3)]
    assert [turn.request.seeds for turn in turns] == [(derived_seed((3, 4), n),) for n in range(3)]


def test_a_cancelled_turn_leaves_no_trace():
    """The row is unchanged, so the client's next attempt continues it; a new row is removed."""
    session = Session(key="k", seed=(0, 0))
    turn = session.begin((1, 2), None, g.Sampling(), None)
    session.ended(turn, Refused("gone"))
    assert session.rows == []
    session.close()
    with pytest.raises(Refused):
        session.begin((1, 2), None, g.Sampling(), None)


def test_only_the_last_rows_are_remembered(loaded):
    """A session that does not record forgets its oldest rows and frees their kept caches."""
    with serving(ScriptedEngine(loaded.tokenizer, ["yes"] * 80), served(loaded)) as client:
        for number in range(70):
            client.chat(f"{number}")
        assert len(client.session.rows) == client.service.limits.rows
        assert len(client.session._points) <= 2 * client.service.limits.rows
        assert len(client.service.engine.freed) == 70 - client.service.limits.rows


def test_a_client_that_leaves_frees_its_row(scripted):
    """Its row is cancelled and removed, whether it leaves before the answer or during a stream."""
    client = scripted("1+" * 150, "1+" * 150)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
    with pytest.raises(httpx2.ReadTimeout):
        client.http.post(CHAT, json=body, timeout=0.1)
    with client.http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    assert soon(lambda: not (client.engine.jobs or client.session.rows))
    assert len(client.engine.freed) >= 1
