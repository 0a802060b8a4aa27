"""Tinker's wire as an outsider meets it: wrong fields, losses, rows, orders; sessions that vanish; floods."""

import json
import time

import numpy as np
import pytest

from grpo_fn.trees import arrays_of

pytest.importorskip("tinker")
from runners.serve.tinker import app
from runners.serve.tinker.app import TrainingLimits
from tests.support.serving import soon
from tests.support.training_server import request, training

TOKENS = [3, 4, 5, 6]
ROW = (TOKENS, {"target_tokens": [4, 5, 6, 7]})
DRAWN = {"logprobs": [-1.0] * 4, "advantages": [1.0] * 4}
FULL = (TOKENS, {**ROW[1], **DRAWN})


@pytest.fixture(scope="module", name="caller")
def _caller(tmp_path_factory):
    with training(tmp_path_factory.mktemp("weights")) as caller:
        yield caller.train()


def weights(caller):
    """The adapters of the caller's model, as bytes."""
    state = caller.server._slots[caller.model].found.state
    return b"".join(np.array(leaf).tobytes() for leaf in arrays_of(state.params))


# What is wrong: the message; the rows, or arrays of one row; the loss and its parameters.
ROWS = {
    "a loss that there is not": ("stable_reinforce", [ROW], "stable_reinforce"),
    "a near name": ("did you mean", [ROW], "cross_entropi"),
    "no rows": ("at least one", []),
    "an array that is missing": ("missing", [ROW], "ppo"),
    "an array that is not known": ("advantages", [FULL]),
    "an array with a near name": ("weights", {**ROW[1], "weight": [1.0] * 4}),
    "a parameter that is not known": ("clip", [FULL], "ppo", {"clip": 0.1}),
    "a parameter that is a text": ("not possible", [FULL], "dro", {"beta": "much"}),
    "a parameter out of range": ("not possible", [FULL], "ppo", {"clip_low_threshold": 1.5}),
    "a band without width": ("not possible", [FULL], "cispo", {"clip_low_threshold": 1.2}),
    "a NaN parameter": ("not possible", [FULL], "dro", {"beta": float("nan")}),
    "a short array": ("expected 4 numbers", {**ROW[1], "weights": [1.0] * 3}),
    "targets of two dimensions": ("[4, 1]", {"target_tokens": [[1], [2], [3], [4]]}),
    "targets that are no integers": ("token ids", {"target_tokens": [1.0] * 4}),
    "a target beyond the vocabulary": ("< 640", {"target_tokens": [1, 2, 3, 640]}),
    "a negative target": ("token ids", {"target_tokens": [1, 2, 3, -1]}),
    "a token beyond the vocabulary": ("token ids", [([3, 4, 5, 9999], ROW[1])]),
    "no tokens": ("found 0", [([], {"target_tokens": np.zeros(0, int)})]),
    "too many tokens": ("expected 1 to 512", [([1] * 600, {"target_tokens": [1] * 600})]),
    "NaN weights": ("finite", {**ROW[1], "weights": [1.0, float("nan"), 1.0, 1.0]}),
    "infinite log-probs": ("finite", {**FULL[1], "logprobs": [float("-inf")] * 4}, "ppo"),
    "weights whose sum is infinite": ("the loss is", {**ROW[1], "weights": [3e38] * 4}),
    "advantages outside of the mask": (
        "sequence_ratio_mask is 0", {**FULL[1], "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0]}, "gspo",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_are_wrong_change_nothing(caller, what):
    """The error has the category user. The next step is refused too, and the one after it is accepted."""
    said, data, *loss = ROWS[what]
    data = [(TOKENS, data)] if isinstance(data, dict) else data
    before = weights(caller)
    fault = caller.forward(data, *loss)
    assert fault["category"] == "user" and said in fault["error"], fault
    fault = caller.step(learning_rate=0.1)
    assert "no step was taken" in fault["error"] and weights(caller) == before
    assert caller.forward(data, *loss, forward_only=True)["category"] == "user"
    assert caller.step(learning_rate=0.0)["metrics"]["grad_norm:mean"] == 0
    caller.forward([ROW])
    assert caller.step(learning_rate=0.0)["metrics"]["grad_norm:mean"] > 0


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ({name: value}, name)
        for name, value in (("learning_rate", -1), ("beta1", 1), ("eps", 0), ("momentum", 1))
    ],
)
def test_rates_that_are_wrong(caller, rates, said):
    """The error names the rate; the request counts as executed."""
    fault = caller.step(**rates)
    assert fault["category"] == "user" and said in fault["error"]
    assert "metrics" in caller.step(learning_rate=0.0)


CALLS = [
    ("create_session", {"nothing": 1}, 400),
    ("session_heartbeat", {}, 400),
    ("session_heartbeat", {"session_id": "none"}, 410),
    ("create_model", {"session_id": "none", "model_seq_id": 0, "lora_config": {"rank": 1}}, 410),
    ("optim_step", {"model_id": "none", "seq_id": 1, "adam_params": {}}, 410),
    ("get_info", {"model_id": 5}, 400),
    ("asample", {"sampling_session_id": "none", "seq_id": 0, "prompt": {}, "sampling_params": {}}, 410),
    ("retrieve_future", {"request_id": "none"}, 410),
    ("nothing", {}, 404),
]


@pytest.mark.parametrize(("call", "fields", "status"), CALLS)
def test_calls_that_are_wrong(caller, call, fields, status):
    """The answer has a message in the form that the client shows."""
    answer = caller.post(call, **fields)
    assert answer.status_code == status and answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff" * 100, b'{"session_id": NaN}', b"[" * 100_000])
def test_bodies_that_are_no_json(caller, body):
    """They get 400."""
    assert caller.post("session_heartbeat", body).status_code == 400


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\xff" * 100, b"\x0a\x05ab", request({"model_id": "", "seq_id": 0}, [])]
)
def test_bodies_that_are_no_request(caller, body):
    """They get 400, and their number can be used again."""
    assert caller.post("forward_backward", body).status_code == 400
    assert "metrics" in caller.step(learning_rate=0.0)


def sample(way, number=0, tokens=(3, 4), **fields):
    """The fields of a sample."""
    params = {"max_tokens": 3, **fields.pop("sampling_params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [*tokens]}]}
    where = {"sampling_session_id": way, "seq_id": number}
    return {**where, "prompt": prompt, "sampling_params": params, **fields}


def way_of(caller, number=0):
    """A sampling session of the base model."""
    session = caller.model.partition(":")[0]
    made = caller.post("create_sampling_session", session_id=session, sampling_session_seq_id=number)
    return made.json()["sampling_session_id"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"target_prompt_logprobs": {"data": []}}, "target_prompt_logprobs"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**9}, "num_samples"),
        ({"tokens": []}, "prompt"),
        ({"tokens": [640]}, "640"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": ["a"]}, "tokens"),
        ({"prompt": {"chunks": 5}}, "chunks"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "data"),
        ({"prompt": [3]}, "prompt"),
        ({"sampling_params": {"max_tokens": 511}}, "at most 512"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"stop": [1.5]}}, "stop"),
        ({"sampling_params": {"stop": 7}}, "stop"),
        ({"sampling_params": {"stop": [""]}}, "stop"),
        ({"sampling_params": {"min_p": 0.1}}, "min_p"),
    ],
)
def test_samples_that_are_wrong(caller, fields, said):
    """They get 400 with the field's name; nothing is decoded."""
    answer = caller.post("asample", **sample(way_of(caller), **fields))
    assert answer.status_code == 400 and said in answer.text
    assert caller.server._trainer.idle


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/a",
        "tinker://a/weights/../../b",
        "/etc",
        "tinker://a/other/b",
        "tinker://a/weights/.b",
    ],
)
def test_paths_lead_nowhere_else(caller, path):
    """Names and paths cannot leave the trainer's folder."""
    session = caller.model.partition(":")[0]
    fields = {"session_id": session, "sampling_session_seq_id": 7}
    assert caller.post("create_sampling_session", **fields, model_path=path).status_code == 400
    fault = caller.result(
        "load_weights", session_id=session, model_seq_id=9 + len(path), path=path, optimizer=True
    )
    assert fault["category"] == "user" and "path: expected" in fault["error"]
    name = path.removeprefix("tinker://a/weights/")
    assert "path: expected" in caller.result("save_weights", **caller.order(), path=name)["error"]


def test_requests_run_in_the_order_of_their_numbers(caller):
    """In any order of arrival; a repeated request has the same result, and an old number is refused."""
    order = [caller.order() for _ in range(4)]
    promises = {}
    for number in (2, 1, 3):
        promises[number] = caller.post("optim_step", **order[number], adam_params={"learning_rate": 0.0})
    waits = caller.server._futures[promises[1].json()["request_id"]]
    assert not waits.answer.done()
    first = caller.post("forward_backward", request(order[0], [ROW])).json()["request_id"]
    norms = [caller.wait(promises[n].json()["request_id"])["metrics"]["grad_norm:mean"] for n in (1, 2, 3)]
    assert norms[0] > 0 and norms[1:] == [0, 0]
    again = caller.post("forward_backward", request(order[0], [ROW])).json()
    assert again["request_id"] == first
    assert "metrics" in caller.step(learning_rate=0.0)
    assert caller.server._slots[caller.model].found.state.accum_weight.item() == 0
    caller.server._futures.clear()
    assert caller.post("optim_step", **order[0], adam_params={}).status_code == 400


def test_a_client_may_take_its_time(tmp_path):
    """A pause between two requests is not a gap in their numbers: the gradient is kept until the step."""
    with training(tmp_path, limits=TrainingLimits(gap=0.2)) as caller:
        caller.train()
        caller.forward([ROW])
        time.sleep(0.8)
        assert caller.step(learning_rate=0.0)["metrics"]["grad_norm:mean"] > 0


def test_a_timer_keeps_no_model_for_which_no_request_waits(caller):
    """It has fired soon after the last request, long before `limits.gap`."""
    caller.forward([ROW])
    slot = caller.server._slots[caller.model]
    assert soon(lambda: slot.timer.when() < time.monotonic(), 10.0)


def test_two_clients_do_not_touch_each_other(caller, tmp_path):
    """Each client has its own adapters over the same base model."""
    mine = weights(caller)
    other = type(caller)(caller.server).train(seed=2)
    other.forward([ROW])
    other.step(learning_rate=0.1)
    assert weights(caller) == mine and weights(other) != mine
    caller.forward([ROW])
    assert caller.step(learning_rate=0.0)["metrics"]["grad_norm:mean"] > 0


def test_a_session_that_vanishes_is_freed(tmp_path):
    """Without a heartbeat, its model, samplers, results and rows are freed. Its waiting calls fail; other
    sessions continue."""
    limits = TrainingLimits(vanish=1.0, hold=0.2)
    with training(tmp_path, limits=limits) as caller:
        caller.train()
        server = caller.server
        way = way_of(caller)
        promise = caller.post(
            "asample", **sample(way, sampling_params={"max_tokens": 500, "stop": []}, num_samples=64)
        )
        assert promise.status_code == 200
        assert soon(lambda: not (server._sessions or server._slots or server._futures), 20.0)
        assert soon(lambda: server._trainer.idle and server._room == limits.room)
        assert caller.post("retrieve_future", request_id=promise.json()["request_id"]).status_code == 410
        assert caller.post("session_heartbeat", session_id=caller.model.partition(":")[0]).status_code == 410
        assert "metrics" in caller.train().step(learning_rate=0.0)


def test_a_heartbeat_keeps_a_session(tmp_path):
    """A finished session is removed at once."""
    with training(tmp_path, limits=TrainingLimits(vanish=1.0)) as caller:
        session = caller.session()
        for _ in range(6):
            time.sleep(0.3)
            assert caller.post("session_heartbeat", session_id=session).status_code == 200
        reason = {"reason": {"type": "success"}, "detail": None}
        assert caller.post(f"sessions/{session}/finish", **reason).status_code == 200
        assert caller.post("session_heartbeat", session_id=session).status_code == 410


def test_floods_meet_a_bound(tmp_path):
    """Sessions, futures and bytes beyond the limits get 429; accepted requests are executed."""
    limits = TrainingLimits(turns=3, slots=2, futures=20, room=200_000, body=100_000, gap=1.5)
    with training(tmp_path, limits=limits) as caller:
        caller.train()
        statuses = [caller.post("create_session").status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        large = request(caller.order(), [ROW] * 4000)
        assert len(large) > limits.body and caller.post("forward_backward", large).status_code == 413
        caller.number = 0
        orders = [caller.order() for _ in range(12)]
        data = [ROW] * 500
        kept = [caller.post("forward_backward", request(each, data)).status_code for each in orders[1:]]
        assert kept[0] == 200 and kept[-1] == 429
        names = [f"{caller.model}:{n}" for n, status in enumerate(kept, 2) if status == 200]
        # The first one is missing.
        assert all("was not received" in caller.wait(name)["error"] for name in names)
        caller.number = len(names) + 1
        assert "was not received" in caller.step(learning_rate=0.1)["error"]
        assert "metrics" in caller.step(learning_rate=0.1)
        assert caller.server._room == limits.room
        session = caller.model.partition(":")[0]
        for number in (1, 2):
            fields = {"session_id": session, "model_seq_id": number, "base_model": "tiny"}
            answer = caller.post("create_model", **fields, lora_config={"rank": 1})
        assert answer.status_code == 400 and "2 models" in answer.text
        way = way_of(caller)
        long = {"max_tokens": 400, "stop": []}
        asked = [
            caller.post("asample", **sample(way, n, num_samples=20, sampling_params=long)).status_code
            for n in range(12)
        ]
        assert asked[0] == 200 and asked[-1] == 429
    assert limits.futures == 20


def test_without_the_key_nothing_is_answered(tmp_path):
    """Every wrong key gets 401; pages and names of other sites get 403."""
    with training(tmp_path, key="tml-key") as caller:
        assert caller.post("create_session").status_code == 200
        for key in ("", "tml-ke", "tml-key2"):
            for call in ("create_session", "telemetry", "healthz", "retrieve_future", "forward_backward"):
                assert caller.http.post(call, headers={"X-API-Key": key}).status_code == 401
        assert caller.http.post("create_session", headers={"Host": "evil.example"}).status_code == 403
        assert (
            caller.http.post("create_session", headers={"Origin": "http://evil.example"}).status_code == 403
        )


def test_a_future_that_is_not_done_says_so(tmp_path):
    """After the hold time, it is answered in the client's form."""
    with training(tmp_path, limits=TrainingLimits(hold=0.1)) as caller:
        caller.train()
        order = [caller.order(), caller.order()]
        name = caller.post("optim_step", **order[1], adam_params={}).json()["request_id"]
        answer = caller.post("retrieve_future", request_id=name)
        assert answer.status_code == 408
        assert answer.json() == {"type": "try_again", "request_id": name, "queue_state": "active"}


def test_results_are_kept_for_a_while(tmp_path, monkeypatch):
    """A client whose connection broke can fetch the answer again; later, it is freed."""
    monkeypatch.setattr(app, "AGAIN", 0.5)
    with training(tmp_path) as caller:
        caller.train()
        promise = caller.post("optim_step", **caller.order(), adam_params={}).json()["request_id"]
        assert caller.wait(promise) == caller.wait(promise)
        time.sleep(1.2)
        assert caller.post("retrieve_future", request_id=promise).status_code == 410


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_only_local_clients_see_where_the_tokenizer_is(tmp_path, host):
    """get_info names the folder of the model on 127.0.0.1; elsewhere it gives the model's name."""
    with training(tmp_path, host=host) as caller:
        caller.server.url = caller.server.url.replace("0.0.0.0", "127.0.0.1")
        caller = type(caller)(caller.server).train()
        data = caller.post("get_info", model_id=caller.model).json()["model_data"]
    folder = str(caller.server._trainer.path)
    assert data == {"model_name": "tiny", "tokenizer_id": folder if host == "127.0.0.1" else "tiny"}


def test_errors_tell_nothing_of_the_machine(caller):
    """Errors contain no path and no traceback."""
    texts = [json.dumps(caller.forward([], "x")), caller.post("create_model", session_id=5).text]
    assert caller.step()["category"] == "user"
    for text in texts:
        assert "/work" not in text and "Traceback" not in text and ".py" not in text
