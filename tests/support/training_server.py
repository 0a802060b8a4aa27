"""A server of Tinker's wire in a thread, its trainer in another one, and plain calls to it."""

import itertools
from contextlib import contextmanager

import httpx2
import numpy as np

from runners.serve.tinker import wire
from runners.serve.tinker.app import TrainingServer
from runners.serve.tinker.trainer import Trainer
from tests.support.serving import embedded, running, served

TRAIN = {"rank": 4, "seed": 1}


class Caller:
    """A client that sends anything."""

    def __init__(self, server, key=""):
        self.server = server
        headers = {"X-API-Key": key} if key else {}
        self.http = httpx2.Client(base_url=f"{server.url}/api/v1/", headers=headers, timeout=60)
        self.model = ""
        self.number = 0

    def post(self, call, content=None, /, **fields):
        """The answer to a call."""
        if content is not None:
            return self.http.post(call, content=content)
        return self.http.post(call, json=fields)

    def result(self, call, content=None, /, **fields):
        """The result of a call's future: JSON, or bytes."""
        promise = self.post(call, content, **fields)
        assert promise.status_code == 200, promise.text
        return self.wait(promise.json()["request_id"])

    def wait(self, name):
        """The answer of a future."""
        answer = self.post("retrieve_future", request_id=name)
        while answer.status_code == 408:
            answer = self.post("retrieve_future", request_id=name)
        assert answer.status_code == 200, answer.text
        is_json = answer.headers["content-type"] == "application/json"
        return answer.json() if is_json else answer.content

    def session(self):
        """A new session."""
        return self.post("create_session").json()["session_id"]

    def train(self, name="tiny", **lora):
        """A new session with a model; its requests are numbered from 1."""
        fields = {"session_id": self.session(), "model_seq_id": 0, "base_model": name}
        made = self.result("create_model", **fields, lora_config={**TRAIN, **lora})
        self.model = made["model_id"]
        self.number = 0
        return self

    def order(self):
        """The model, and the next number."""
        self.number += 1
        return {"model_id": self.model, "seq_id": self.number}

    def step(self, **rates):
        """An optimizer step."""
        return self.result("optim_step", **self.order(), adam_params=rates)

    def forward(self, data, loss="cross_entropy", config=(), *, forward_only=False):
        """The log-probs of rows, as (tokens, arrays by name), and the metrics; or the fault."""
        answer = self.result("forward_backward", request(self.order(), data, loss, config, forward_only))
        if isinstance(answer, dict):
            return answer
        message = wire.messages.ForwardBackwardOutput.FromString(answer)
        field = message.loss_fn_outputs[0].fields["logprobs"]
        ends = np.frombuffer(field.offsets, np.int64) // 4
        flat = np.frombuffer(field.data, np.float32)
        return [flat[a:b] for a, b in itertools.pairwise(ends)], dict(message.metrics)


def request(order, data, loss="cross_entropy", config=(), forward_only=False):
    """The bytes of a forward_backward."""
    message = wire.messages.ForwardBackwardRequest(
        model_id=order["model_id"], seq_id=order["seq_id"], loss_fn=loss, forward_only=forward_only
    )
    for name, value in dict(config).items():
        kind = "text" if isinstance(value, str) else "number"
        setattr(message.loss_fn_config_v2[name], kind, value)
    for tokens, arrays in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
        for name, values in arrays.items():
            values = np.array(values)
            whole = values.dtype.kind == "i"
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = wire.messages.DTYPE_INT64 if whole else wire.messages.DTYPE_FLOAT32
            tensor.dense = values.astype(np.int64 if whole else np.float32).tobytes()
            tensor.shape.extend(values.shape)
    return message.SerializeToString()


@contextmanager
def training(folder, *, loaded=None, key="", limits=None, host="127.0.0.1", **model):
    """A caller of a server over the model in the package."""
    loaded = loaded or embedded()
    trainer = Trainer(loaded.policy, loaded.engine, loaded.path, folder)
    app = TrainingServer(trainer, served(loaded, **model), host, key=key, limits=limits)
    with app as server, running(trainer):
        yield Caller(server, key)
