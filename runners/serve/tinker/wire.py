"""What Tinker's client sends and gets: JSON by tables of fields, rows of tokens as protobuf.

The messages are those of the package `tinker`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

import grpo_fn as g
from runners.engines.engine import Row, Seed
from runners.errors import UserError, did_you_mean, show
from runners.serve.chat import ServedModel
from runners.serve.sessions import derived_seed
from runners.serve.tinker.losses import Datum
from runners.serve.wire import ApiError, checked, read_json

ANY = None  # a field that is taken and not used
NEEDED = object()  # as a default: the field must be there
_IDS = "each: 0 <= x <= 2147483647"
_COUNT = "0 <= x <= 9223372036854775807"
_IDENTITY = {"session_id": (str, "", NEEDED), "model_seq_id": (int, _COUNT, NEEDED)}
_MODEL = {"model_id": (str, "", NEEDED), "seq_id": (int, "1 <= x <= 1000000000", NEEDED)}
_SAVED = {**_MODEL, "path": (str, "", ""), "ttl_seconds": ANY, "user_metadata": ANY}
_ABSENT: dict[str, Any] = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "base_model": None,
    "model_path": None,
}
# Of each call: its fields, with type, range, and default.
FIELDS: dict[str, dict[str, Any]] = {
    "create_session": dict.fromkeys(
        ("tags", "user_metadata", "sdk_version", "project_id", "display_name"), ANY
    ),
    "session_heartbeat": {"session_id": (str, "", NEEDED)},
    "create_model": {
        **_IDENTITY,
        "base_model": (str, "", NEEDED),
        "lora_config": (dict, "", NEEDED),
        "optimizer_config": (dict, "", {}),
        "user_metadata": ANY,
    },
    "lora_config": {
        "rank": (int, "1 <= x <= 512", NEEDED),
        "seed": (int, _COUNT, None),
        "train_mlp": (bool, "", True),
        "train_attn": (bool, "", True),
        "train_unembed": (bool, "", True),
    },
    "optimizer_config": {"type": (str, "", "adamw")},
    "get_info": {"model_id": (str, "", NEEDED)},
    "optim_step": {**_MODEL, "adam_params": (dict, "", NEEDED)},
    "adam_params": {
        "learning_rate": (float, ">= 0", 1e-4),
        "beta1": (float, "0 <= x < 1", 0.9),
        "beta2": (float, "0 <= x < 1", 0.95),
        "eps": (float, "> 0", 1e-12),
        "weight_decay": (float, ">= 0", 0.0),
        "grad_clip_norm": (float, ">= 0", 0.0),
    },
    "save_weights": {**_SAVED, "overwrite": (bool, "", False)},
    "save_weights_for_sampler": {
        **_SAVED,
        "sampling_session_seq_id": (int, _COUNT, None),
        "kind": (str, "", "snapshot"),
    },
    "load_weights": {
        "model_id": (str, "", ""),
        "seq_id": (int, _COUNT, 0),
        "session_id": (str, "", ""),
        "model_seq_id": (int, _COUNT, 0),
        "base_model": (str, "", None),
        "path": (str, "", NEEDED),
        "optimizer": (bool, "", NEEDED),
        "optimizer_config": (dict, "", {}),
        "user_metadata": ANY,
    },
    "create_sampling_session": {
        "session_id": (str, "", NEEDED),
        "sampling_session_seq_id": (int, _COUNT, NEEDED),
        "base_model": (str, "", None),
        "model_path": (str, "", None),
    },
    "asample": {
        "sampling_session_id": (str, "", NEEDED),
        "seq_id": (int, _COUNT, NEEDED),
        "num_samples": (int, "1 <= x <= 1024", 1),
        "prompt": (dict, "", NEEDED),
        "sampling_params": (dict, "", NEEDED),
        "prompt_logprobs": (bool, "", False),
        "prompt_logprobs_last_n": (int, ">= 1", None),
        **dict.fromkeys(_ABSENT, ANY),
    },
    "sampling_params": {
        "max_tokens": (int, ">= 1", None),
        "seed": (int, _COUNT, None),
        "stop": ANY,
        "temperature": (float, ">= 0", 1.0),
        "top_k": (int, f"-1 or {_COUNT}", -1),
        "top_p": (float, "0 < x <= 1", 1.0),
    },
    "retrieve_future": {"request_id": (str, "", NEEDED), "allow_metadata_only": ANY},
    "retrieve_futures": {
        "target": (dict, "", NEEDED),
        "prev_cursor": (int, _COUNT, 0),
        "timeout": (float, ">= 0", None),
        "retrieved_request_ids": (tuple[str, ...], "", ()),
    },
    "target": {
        "type": ANY,
        "sampling_session_id": (str, "", NEEDED),
        "cloned_sampler_id": (int, _COUNT, 0),
    },
    "cancel_future": {"request_id": (str, "", NEEDED)},
}
_DTYPES = {
    messages.DTYPE_FLOAT32: np.float32,
    messages.DTYPE_INT64: np.int64,
    messages.DTYPE_INT32: np.int32,
}


def read(call: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A call's fields, each with a value. Raises ApiError for others, and for wrong values."""
    fields = FIELDS[call]
    found = {name: spec[2] for name, spec in fields.items() if spec is not None}
    for name, value in body.items():
        if name == "type" and "type" not in fields:
            continue
        if name not in fields:
            near = did_you_mean(name, fields)
            raise ApiError(f"{call}: there is no field {show(name)}{near}", name)
        spec = fields[name]
        if spec is None:
            found[name] = value
        elif value is not None and spec[0] is dict:
            found[name] = _object(name, value)
        elif value is not None:
            found[name] = checked(name, value, spec[0], spec[1])
    for name, value in found.items():
        if value is NEEDED:
            raise ApiError(f"{call}: the field {show(name)} is missing", name)
    return found


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{name}: expected an object, found {show(value)}", name)
    return value


def unpacked(body: bytes, encoding: str, most: int) -> bytes:
    """A body as it was before its encoding. Raises ApiError if it is damaged, or too large."""
    if encoding != "zstd":
        return body
    try:
        with zstandard.ZstdDecompressor(max_window_size=2 * most).stream_reader(body) as stream:
            whole = stream.read(most + 1)
    except zstandard.ZstdError as error:
        raise ApiError(f"the body cannot be read as zstd ({error})") from error
    if len(whole) > most:
        raise ApiError(f"the body has over {most:,} bytes", status=413)
    return whole


def read_body(call: str, body: bytes) -> dict[str, Any]:
    """The fields of a call in a body. What is not in FIELDS has none. Raises ApiError."""
    if call == "forward_backward":
        return _read_forward(body)
    return read(call, read_json(body)) if call in FIELDS else {}


def _read_forward(body: bytes) -> dict[str, Any]:
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise ApiError("the body cannot be read as a ForwardBackwardRequest") from error
    if message.seq_id < 1:
        raise ApiError(f"seq_id: expected at least 1, found {message.seq_id}")
    number = message.seq_id
    return {"message": message, "model_id": message.model_id, "seq_id": number, "size": len(body)}


def loss_config(message: Any) -> dict[str, float | str]:
    """The parameters of a request's loss."""
    second = {
        name: getattr(v, v.WhichOneof("value") or "text")
        for name, v in message.loss_fn_config_v2.items()
    }
    return {**message.loss_fn_config, **second}


def data_of(message: Any) -> list[Datum]:
    """The rows of a request. Raises UserError for what is not text, or no array."""
    return [_datum(f"data[{number}]", each) for number, each in enumerate(message.data)]


def _datum(where: str, datum: Any) -> Datum:
    parts = [np.zeros(0, np.int32)]
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError(
                f"{where}.model_input: expected text, found {chunk.WhichOneof('chunk')}"
            )
        parts.append(_array(f"{where}.model_input", chunk.encoded_text.tokens, np.int32))
    inputs = {
        name: _tensor(f"{where}.{name}", tensor) for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(np.concatenate(parts), inputs)


def _tensor(where: str, tensor: Any) -> np.ndarray:
    if tensor.dtype not in _DTYPES or tensor.HasField("sparse_csr"):
        raise UserError(f"{where}: expected a dense array of float32 or int64")
    found = _array(where, tensor.dense, _DTYPES[tensor.dtype])
    shape = [*tensor.shape] or [len(found)]
    if any(size < 0 for size in shape) or int(np.prod(shape, dtype=object)) != len(found):
        raise UserError(f"{where}: expected {len(found)} numbers, found the shape {shape}")
    return found.reshape(shape)


def _array(where: str, data: bytes, kind: Any) -> np.ndarray:
    if len(data) % np.dtype(kind).itemsize:
        raise UserError(f"{where}: {len(data)} bytes are no array of {np.dtype(kind).name}")
    return np.frombuffer(data, kind)


def forward_output(rows: Sequence[np.ndarray], loss: float) -> bytes:
    """A ForwardBackwardOutput."""
    ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    data = np.concatenate(rows)
    field = messages.BatchedTensor(
        data=data.tobytes(), offsets=ends.tobytes(), dtype=messages.DTYPE_FLOAT32
    )
    record = messages.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))
    output = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": loss}
    )
    return output.SerializeToString()


def sample_output(rows: Sequence[Row], prompt_logp: np.ndarray | None) -> bytes:
    """A SampleResponse."""
    reasons = {"stop": messages.STOP_REASON_STOP}
    sequences = [
        messages.SampledSequence(
            stop_reason=reasons.get(row.finish, messages.STOP_REASON_LENGTH),
            tokens=np.array(row.tokens, np.int32).tobytes(),
            logprobs=np.array(row.logp, np.float32).tobytes(),
        )
        for row in rows
    ]
    scores = None if prompt_logp is None else prompt_logp.tobytes()
    return messages.SampleResponse(sequences=sequences, prompt_logprobs=scores).SerializeToString()


def rates_of(params: Mapping[str, Any]) -> g.Rates:
    """The rates of an `optim_step`."""
    asked = read("adam_params", params)
    return g.Rates(
        learning_rate=asked["learning_rate"],
        betas=(asked["beta1"], asked["beta2"]),
        eps=asked["eps"],
        weight_decay=asked["weight_decay"],
        max_grad_norm=asked["grad_clip_norm"] or None,
    )


def prompt_of(prompt: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of a ModelInput. Raises ApiError for what is not text."""
    chunks = prompt.get("chunks")
    if not isinstance(chunks, list) or {*prompt} != {"chunks"}:
        raise ApiError("prompt: expected chunks, a list", "prompt")
    ids: list[int] = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise ApiError("prompt: expected chunks of encoded_text alone", "prompt")
        ids += checked("prompt", chunk.get("tokens"), tuple[int, ...], _IDS)
    if not ids:
        raise ApiError("prompt: expected tokens, found none", "prompt")
    return tuple(ids)


def refuse_extras(asked: Mapping[str, Any]) -> None:
    """Raises ApiError for parts of a sample that this server cannot make."""
    for name, usual in _ABSENT.items():
        if asked.get(name) not in (None, usual):
            raise ApiError(f"{name} is not supported: expected {show(usual)}", name)


def sampling_of(params: Mapping[str, Any], model: ServedModel, prompt: int) -> g.Sampling:
    """How to sample behind a prompt of so many tokens. Raises ApiError if there is no room."""
    asked = read("sampling_params", params)
    room = model.length - prompt
    wanted = asked["max_tokens"] or max(room, 1)
    if wanted > room:
        found = f"a prompt of {prompt} tokens and max_tokens = {wanted}"
        raise ApiError(f"{found}: expected at most {model.length} together", "max_tokens")
    stop = asked.get("stop")
    stop = [stop] if isinstance(stop, str) else stop
    numbers = isinstance(stop, list) and bool(stop) and isinstance(stop[0], int)
    ids = checked("stop", stop if numbers else [], tuple[int, ...], _IDS)
    texts = checked("stop", [] if numbers else stop or [], tuple[str, ...], "no empty string")
    return g.Sampling(
        max_new_tokens=wanted,
        temperature=asked["temperature"],
        top_k=max(asked["top_k"], 0),
        top_p=asked["top_p"],
        eos_ids=frozenset() if stop == [] else model.eos_ids | frozenset(ids),
        stop=texts,
    )


def seeds_of(asked: Mapping[str, Any], count: int) -> tuple[Seed, ...]:
    """The seeds of a sample's completions."""
    given = asked["sampling_params"].get("seed")
    first = secrets.randbits(63) if given is None else given
    return tuple(derived_seed((first >> 32, first & 0xFFFFFFFF), n) for n in range(count))
