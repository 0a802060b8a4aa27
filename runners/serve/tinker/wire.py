"""Parses requests and writes responses for Tinker's client. Tables of fields describe the JSON;
rows of tokens are protobuf messages, which the package `tinker` defines.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as messages

import grpo_fn as g
from grpo_fn.trees import flat
from runners.engines.engine import Row
from runners.errors import UserError, show
from runners.serve.chat import ServedModel
from runners.serve.tinker.losses import Datum
from runners.serve.wire import ApiError, checked, read_fields, read_json

NEEDED = object()  # as a default: the field is required
_IDS = "each: 0 <= x <= 2147483647"
_COUNT = "0 <= x <= 9223372036854775807"
_NUMBER = (int, _COUNT, NEEDED)
_TEXT = (str, "", NEEDED)
_OBJECT = (dict, "", NEEDED)
_NEW_MODEL = {"session_id": _TEXT, "model_seq_id": _NUMBER, "base_model": (str, "", None)}
_MODEL = {"model_id": _TEXT, "seq_id": (int, "1 <= x <= 1000000000", NEEDED)}
# The fields of each call and of its nested objects: type (Any means checked later), range, default.
FIELDS: dict[str, dict[str, Any]] = {
    "create_session": {},
    "session_heartbeat": {"session_id": _TEXT},
    "create_model": {**_NEW_MODEL, "lora_config": _OBJECT},
    "lora_config": {
        "rank": (int, "1 <= x <= 512", NEEDED),
        "seed": (int, _COUNT, None),
        "train_mlp": (bool, "", True),
        "train_attn": (bool, "", True),
        "train_unembed": (bool, "", True),
    },
    "get_info": {"model_id": _TEXT},
    "forward_backward": _MODEL,
    "optim_step": {**_MODEL, "adam_params": _OBJECT},
    "adam_params": {
        "learning_rate": (float, ">= 0", 1e-4),
        "beta1": (float, "0 <= x < 1", 0.9),
        "beta2": (float, "0 <= x < 1", 0.95),
        "eps": (float, "> 0", 1e-12),
        "weight_decay": (float, ">= 0", 0.0),
        "grad_clip_norm": (float, ">= 0", 0.0),
    },
    "save_weights": {**_MODEL, "path": (str, "", ""), "overwrite": (bool, "", False)},
    "save_weights_for_sampler": {
        **_MODEL,
        "path": (str, "", ""),
        "sampling_session_seq_id": (int, _COUNT, None),
    },
    "load_weights": {**_NEW_MODEL, "path": _TEXT, "optimizer": (bool, "", NEEDED)},
    "create_sampling_session": {
        "session_id": _TEXT,
        "sampling_session_seq_id": _NUMBER,
        "base_model": (str, "", None),
        "model_path": (str, "", None),
    },
    "asample": {
        "sampling_session_id": _TEXT,
        "seq_id": _NUMBER,
        "num_samples": (int, "1 <= x <= 1024", 1),
        "prompt": _OBJECT,
        "sampling_params": _OBJECT,
        "prompt_logprobs": (bool, "", False),
        "prompt_logprobs_last_n": (int, ">= 1", None),
    },
    "prompt": {"chunks": (tuple[dict, ...], "", NEEDED)},
    "encoded_text": {"tokens": (tuple[int, ...], _IDS, NEEDED)},
    "sampling_params": {
        "max_tokens": (int, ">= 1", None),
        "seed": (int, _COUNT, None),
        "stop": (Any, "", None),
        "temperature": (float, ">= 0", 1.0),
        "top_k": (int, f"-1 or {_COUNT}", -1),
        "top_p": (float, "0 < x <= 1", 1.0),
    },
    "retrieve_future": {"request_id": _TEXT},
}
# Fields with fixed values, because other values are not implemented.
FIXED: dict[str, tuple[Any, ...]] = {
    "optimizer_config": ({"type": "adamw"},),
    "kind": ("snapshot", "inflight"),
    "topk_prompt_logprobs": (0,),
    "topk_sample_logprobs": (0,),
    "target_prompt_logprobs": (),
    "prompt_alt_tokens_k": (0,),
    "record_stability_info": (False,),
}
# Fields that do not affect an answer here.
IGNORED = {
    *("sdk_version", "tags", "user_metadata", "project_id", "display_name", "ttl_seconds"),
    *("type", "allow_metadata_only", "weights_access_token"),
}
_DTYPES = {
    messages.DTYPE_FLOAT32: np.float32,
    messages.DTYPE_INT64: np.int64,
    messages.DTYPE_INT32: np.int32,
}


def read(call: str, given: dict[str, Any]) -> dict[str, Any]:
    """Parses the fields of a call or of a nested object; missing fields receive their defaults.
    Raises ApiError for unknown or missing fields and for invalid values.
    """
    fields = FIELDS[call]
    used = {name: (kind, within) for name, (kind, within, _) in fields.items()}
    defaults = {name: default for name, (_, _, default) in fields.items()}
    whole = defaults | read_fields(given, used, FIXED, IGNORED)
    missing = [name for name, value in whole.items() if value is NEEDED]
    if missing:
        raise ApiError(f"{call}: the field {show(missing[0])} is missing", missing[0])
    return whole


def read_body(call: str, body: bytes) -> dict[str, Any]:
    """Parses a call's body; a call without a table has no fields. Raises ApiError for an invalid
    body.
    """
    if call != "forward_backward":
        return read(call, read_json(body)) if call in FIELDS else {}
    try:
        message = messages.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise ApiError("the body cannot be read as a ForwardBackwardRequest") from error
    order = {"model_id": message.model_id, "seq_id": message.seq_id}
    return {**read(call, order), "message": message, "size": len(body)}


def loss_config(message: Any) -> dict[str, float | str]:
    """Returns the loss parameters from a request."""
    return dict(message.loss_fn_config) | {
        name: getattr(value, value.WhichOneof("value") or "text")
        for name, value in message.loss_fn_config_v2.items()
    }


def data_of(message: Any) -> list[Datum]:
    """Returns the rows from a request. Raises UserError unless they contain only text and dense
    arrays.
    """
    try:
        return [_datum(each) for each in message.data]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"data: expected text, and dense arrays of float32 or int64: {error}"
        ) from error


def _datum(datum: Any) -> Datum:
    if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
        raise ValueError("found an image or audio")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
    inputs = {
        name: np.frombuffer(each.dense, _DTYPES[each.dtype]).reshape([*each.shape] or -1)
        for name, each in datum.loss_fn_inputs.items()
    }
    return Datum(np.frombuffer(tokens, np.int32), inputs)


def forward_output(rows: Sequence[np.ndarray], loss: float) -> bytes:
    """Serializes a ForwardBackwardOutput."""
    ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    field = messages.BatchedTensor(
        data=np.concatenate(rows).tobytes(),
        offsets=ends.tobytes(),
        dtype=messages.DTYPE_FLOAT32,
    )
    record = messages.ArrayRecord(fields={"logprobs": field}, num_datums=len(rows))
    return messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics={"loss:sum": loss}
    ).SerializeToString()


def sample_output(rows: Sequence[Row], prompt_logp: np.ndarray | None) -> bytes:
    """Serializes a SampleResponse."""
    sequences = [
        messages.SampledSequence(
            stop_reason=messages.StopReason.Value(f"STOP_REASON_{row.finish.upper()}"),
            tokens=np.array(row.tokens, np.int32).tobytes(),
            logprobs=np.array(row.logp, np.float32).tobytes(),
        )
        for row in rows
    ]
    scores = None if prompt_logp is None else prompt_logp.tobytes()
    return messages.SampleResponse(sequences=sequences, prompt_logprobs=scores).SerializeToString()


def rates_of(params: Any) -> g.Rates:
    """Parses the learning rate and the other rates for an `optim_step`."""
    asked = read("adam_params", params)
    return g.Rates(
        asked["learning_rate"],
        (asked["beta1"], asked["beta2"]),
        asked["eps"],
        asked["weight_decay"],
        asked["grad_clip_norm"] or None,
    )


def prompt_of(given: Any) -> tuple[int, ...]:
    """Returns a ModelInput's token ids. Raises ApiError unless it is text with tokens."""
    ids = [read("encoded_text", each)["tokens"] for each in read("prompt", given)["chunks"]]
    if not any(ids):
        raise ApiError("prompt: expected chunks with tokens, found none", "prompt")
    return tuple(flat(ids))


def sampling_of(given: Any, model: ServedModel, prompt: int) -> tuple[g.Sampling, int]:
    """Parses the sampling settings and the seed; `prompt` is the number of prompt tokens. Raises
    ApiError if there is no room after the prompt.
    """
    asked = read("sampling_params", given)
    wanted = asked["max_tokens"] or max(model.length - prompt, 1)
    if prompt + wanted > model.length:
        raise ApiError(
            f"a prompt of {prompt} tokens and max_tokens = {wanted}: expected at most "
            f"{model.length} together",
            "max_tokens",
        )
    stop = asked["stop"] or []
    numbers = isinstance(stop, list) and all(type(each) is int for each in stop)
    ids = checked("stop", stop if numbers else [], tuple[int, ...], _IDS)
    sampling = g.Sampling(
        max_new_tokens=wanted,
        temperature=asked["temperature"],
        top_k=max(asked["top_k"], 0),
        top_p=asked["top_p"],
        eos_ids=frozenset() if asked["stop"] == [] else model.eos_ids | frozenset(ids),
        stop=checked("stop", [] if numbers else stop, tuple[str, ...], "no empty string"),
    )
    return sampling, secrets.randbits(63) if asked["seed"] is None else asked["seed"]
