"""What clients send and get, over HTTP with the embedded model: ids, log-probs, streams, refusals."""

import json

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.errors import UserError
from runners.serve import wire
from runners.serve.wire import FIXED, USED, ApiError
from tests.support.serving import served, serving

QUESTION = "Anna has 3 pens and buys 4 more. How many pens has she?"
MESSAGES = [{"role": "user", "content": QUESTION}]
IDS = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="module")
def client(loaded):
    """A client of a server with this model."""
    with serving(loaded.engine, served(loaded)) as client:
        yield client


@pytest.fixture(scope="module")
def prompt(loaded):
    """The question as ids."""
    return list(loaded.example(MESSAGES).tokens)


def recomputed(loaded, prompt, tokens, temperature=1.0):
    """The log-probs of tokens after a prompt, by one forward pass."""
    logits_td = loaded.module(mx.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1] / temperature
    logp_td = logits_td - mx.logsumexp(logits_td, axis=-1, keepdims=True)
    return np.array(logp_td)[np.arange(len(tokens)), list(tokens)]


def test_chat_has_the_ids_and_logprobs_that_the_engine_drew(client, loaded, prompt):
    """Top-level prompt ids, a token_id:N entry for each token, and log-probs of the sampled distribution
    to 1e-4."""
    answer = client.chat(QUESTION, temperature=0.8, max_tokens=30, seed=5, **IDS)
    (choice,) = answer["choices"]
    tokens = choice["token_ids"]
    entries = choice["logprobs"]["content"]
    assert answer["prompt_token_ids"] == prompt
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in tokens]
    logp = [entry["logprob"] for entry in entries]
    np.testing.assert_allclose(logp, recomputed(loaded, prompt, tokens, 0.8), atol=1e-4)
    assert choice["message"]["content"] == loaded.decoder.decode(tokens)
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    assert answer["usage"] == {**counts, "total_tokens": len(prompt) + len(tokens)}


def test_completions_of_ids_as_trl_asks_for_them(client, loaded, prompt):
    """TRL's asynchronous payload: ids as the prompt, logprobs 0, a seed of 63 bits, return_token_ids."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": 20, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0,
        "seed": 2**63 - 1,
    }  # fmt: skip
    status, answer = client.post(TEXT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    expected = recomputed(loaded, prompt, choice["token_ids"])
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=1e-4)
    assert client.post(TEXT, body)[1]["choices"] == answer["choices"]  # the seed's completion


def test_generate_takes_ids_and_gives_ids(client, loaded, prompt):
    """As `renderers` reads it: request_id, token_ids, and a token_id:N entry for each token."""
    sampling = {
        "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "seed": 3, "logprobs": 1,
        "stop_token_ids": list(loaded.eos_ids), "skip_special_tokens": False,
    }  # fmt: skip
    body = {"model": "tiny", "token_ids": prompt, "cache_salt": "1", "priority": 0}
    status, answer = client.post(GENERATE, {**body, "sampling_params": sampling})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert answer["request_id"] and choice["finish_reason"] in ("stop", "length")
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(-100 < entry["logprob"] <= 0 for entry in entries)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_is_the_whole_answer_in_pieces(client, path):
    """The text, ids and log-probs of its events add up to those of the whole answer."""
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": QUESTION}
    body = {**asked, "max_tokens": 25, "seed": 11, "n": 2, "return_token_ids": True}
    body["logprobs"] = True if path == CHAT else 0
    events = client.stream(path, {**body, "stream_options": {"include_usage": True}})
    status, whole = client.post(path, body)
    assert status == 200, whole
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        text = [(part["delta"].get("content", "") if path == CHAT else part["text"]) for part in parts]
        assert "".join(text) == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        key = "content" if path == CHAT else "token_logprobs"
        found = [each for part in parts for each in part["logprobs"][key]]
        assert found == choice["logprobs"][key]


def test_completions_of_a_call_differ_and_those_of_a_seed_do_not(client):
    """n = 3 gives three different texts; the same seed repeats them."""
    body = {"messages": MESSAGES, "n": 3, "seed": 1, "max_tokens": 30, "temperature": 1.2}
    first, again = (client.post(CHAT, body)[1]["choices"] for _ in range(2))
    texts = [choice["message"]["content"] for choice in first]
    assert len(set(texts)) == 3
    assert texts == [choice["message"]["content"] for choice in again]


def test_several_prompts_in_one_call(client):
    """The completions of a list of prompts are in order."""
    status, answer = client.post(TEXT, {"prompt": ["1+1=", "2+2="], "n": 2, "max_tokens": 4, "seed": 0})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_reply_ends_before_a_stop_string(client):
    """The stop string is in the reply's ids but not in its text, streamed or not."""
    body = {"messages": MESSAGES, "max_tokens": 60, "seed": 2, "temperature": 0}
    whole = client.post(CHAT, body)[1]["choices"][0]["message"]["content"]
    stop = whole[4:6]
    answer = client.post(CHAT, {**body, "stop": stop})[1]
    cut = whole[: whole.index(stop)]
    assert answer["choices"][0]["message"]["content"] == cut
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = client.stream(CHAT, {**body, "stop": [stop]})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == cut


def test_an_end_token_is_an_end_only_if_it_is_wanted(client, loaded):
    """stop_token_ids end a completion; ignore_eos continues after the model's end token."""
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, **IDS}
    tokens = client.post(CHAT, body)[1]["choices"][0]["token_ids"]
    cut = client.post(CHAT, {**body, "stop_token_ids": [tokens[3]]})[1]["choices"][0]
    assert cut["token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert cut["finish_reason"] == "stop"
    longer = client.post(CHAT, {**body, "ignore_eos": True})[1]["choices"][0]
    assert tokens[-1] in loaded.eos_ids and len(longer["token_ids"]) == 60


def test_models_and_health(client):
    """`renderers` reads the model card, and a supervisor reads /health."""
    (card,) = client.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    assert client.http.get("/health").status_code == 200


REFUSED = [
    (CHAT, {"temprature": 1}, "temprature", "did you mean temperature"),
    (CHAT, {"temperature": "1"}, "temperature", "expected a number"),
    (CHAT, {"temperature": -1}, "temperature", ">= 0"),
    (CHAT, {"top_p": 0}, "top_p", "0 < x <= 1"),
    (CHAT, {"top_k": -2}, "top_k", "-1 or 0"),
    (CHAT, {"n": 0}, "n", "1 <= x"),
    (CHAT, {"n": True}, "n", "an integer"),
    (CHAT, {"max_tokens": 10**20}, "max_tokens", "2147483647"),
    (CHAT, {"seed": 2**63}, "seed", "9223372036854775807"),
    (CHAT, {"stop": [""]}, "stop", "no empty string"),
    (CHAT, {"stop": 3}, "stop", "list of strings"),
    (CHAT, {"top_logprobs": 5, "logprobs": True}, "top_logprobs", "0"),
    (CHAT, {"logprobs": 1}, "logprobs", "true or false"),
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (CHAT, {"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", '"auto" or "none"'),
    (CHAT, {"tools": [{"type": "function"}]}, "tools", "functions with names"),
    (CHAT, {"tools": 5}, "tools", "functions with names"),
    (CHAT, {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "template"),
    (CHAT, {"messages": []}, "messages", "a list"),
    (CHAT, {"messages": None}, "messages", "a list"),
    (CHAT, {"messages": "hello"}, "messages", "a list"),
    (CHAT, {"messages": ["hello"]}, "messages", "a role"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages", "message 0: expected a role of"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "message 0: expected text"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "the tokenizer fails"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "expected text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}, *MESSAGES]}, "messages", "tool_calls"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}, *MESSAGES]}, "messages", "tool_calls"),
    (CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}]}, "messages", "assistant's turn"),
    (TEXT, {"prompt": None}, "prompt", "a string"),
    (TEXT, {"prompt": ""}, "prompt", "empty"),
    (TEXT, {"prompt": [1, "x"]}, "prompt", "list of integers"),
    (TEXT, {"prompt": [-1]}, "prompt", "list of integers"),
    (TEXT, {"prompt": [99_999_999]}, "prompt", "token ids below"),
    (TEXT, {"prompt": "x", "echo": True}, "echo", "not supported"),
    (TEXT, {"prompt": "x", "logprobs": 3}, "logprobs", "0 or 1"),
    (GENERATE, {}, "token_ids", "token ids, found an empty one"),
    (GENERATE, {"token_ids": "x"}, "token_ids", "list of integers"),
    (GENERATE, {"token_ids": [5], "sampling_params": 3}, "sampling_params", "an object"),
    (GENERATE, {"token_ids": [5], "features": {"a": 1}}, "features", "not supported"),
    (GENERATE, {"token_ids": [5], "content_parts": [1]}, "content_parts", "not supported"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), REFUSED)
def test_what_is_not_real_is_refused_by_its_name(client, path, body, param, says):
    """The error has status 400, the parameter's name and the expected value, in OpenAI's form."""
    status, answer = client.post(path, {"messages": MESSAGES} | body if path == CHAT else body)
    error = answer["error"]
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert says in error["message"]


NEUTRAL = {
    "user": "me", "store": False, "metadata": {}, "presence_penalty": 0, "logit_bias": {},
    "response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "auto",
    **dict.fromkeys(("stream_options", "stop", "top_logprobs", "functions")),
}  # fmt: skip


def test_what_changes_nothing_is_taken(client):
    """Clients send these parameters by default."""
    assert client.post(CHAT, {"messages": MESSAGES, "max_tokens": 2, **NEUTRAL})[0] == 200


def test_a_context_that_overflows_says_so_in_openai_s_words(client):
    """Clients look for the code context_length_exceeded and for OpenAI's words."""
    for body in ({"max_tokens": 10_000}, {"messages": [{"role": "user", "content": "7+" * 600}]}):
        status, answer = client.post(CHAT, {"messages": MESSAGES, **body})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 512 tokens" in answer["error"]["message"]


def test_another_model_and_another_path_are_not_there(client):
    """They get 404 in OpenAI's form."""
    status, answer = client.post(CHAT, {"model": "gpt-5", "messages": MESSAGES})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert client.post("/v1/embeddings", {})[0] == 404
    assert client.http.get(CHAT).status_code == 405
    assert client.http.get("/../etc/passwd").status_code == 404


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"a":NaN}', b"\xff", b"[" * 200_000, b'{"n":' + b"9" * 9000 + b"}"]
)
def test_a_body_that_is_no_object_is_refused(client, body):
    """It gets 400: not JSON, not an object, nested too deeply, or with an invalid number."""
    answer = client.http.post(CHAT, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*USED, *FIXED, "messages", "tools", "prompt", "token_ids", "sampling_params"])
CALLS = st.fixed_dictionaries(
    {}, optional={"id": JSON, "function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])},
    optional={
        "content": JSON | st.text(max_size=5),
        "tool_calls": st.lists(CALLS, max_size=2) | JSON,
        "tool_call_id": JSON,
        "name": JSON,
        "reasoning": JSON,
    },
)
TOOL = st.fixed_dictionaries({"function": JSON | st.fixed_dictionaries({"name": JSON, "parameters": JSON})})


@given(st.dictionaries(NAMES, JSON, max_size=4), st.lists(MESSAGE, max_size=3), st.lists(TOOL, max_size=2))
def test_any_object_is_read_or_refused(loaded, values, messages, tools):
    """No other exception is raised, up to the tokens of the prompt."""
    model = served(loaded)
    bodies = [values, {"messages": messages, "tools": tools, **values}, {"messages": messages}]
    for read in (wire.read_chat, wire.read_completion, wire.read_generate):
        for body in bodies:
            try:
                asked = read(json.loads(json.dumps(body)))
                if asked.chat is not None:
                    assert len(asked.chat.keys) == len(asked.chat.messages) + 1
                    asked.sampling(model, len(model.prompt(asked.chat)))
            except (ApiError, UserError):
                pass
