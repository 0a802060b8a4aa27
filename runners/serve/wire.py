"""Parses requests and writes responses for OpenAI's completions and chats, and for vLLM's
generation from token ids.

A parameter is used, rejected with an error, or ignored because it does not affect the reply.
"""

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

import grpo_fn as g
from runners.config import rules
from runners.data.messages import Message, conversation, prompt_fault
from runners.engines.engine import Row, Seed
from runners.errors import did_you_mean, printable, show
from runners.serve.chat import Chat, Reply, ServedModel
from runners.serve.sessions import derived_seed

SHORT = 16  # default token limit of a completion, as in OpenAI and vLLM
_LONG = rules.INT_MAX
_IDS = f"each: 0 <= x <= {_LONG}"
# Type and range of each parameter that is used; Any means the type is checked later.
USED: dict[str, tuple[Any, str]] = {
    "model": (str, ""),
    "n": (int, "1 <= x <= 128"),
    "seed": (int, "0 <= x <= 9223372036854775807"),
    "max_tokens": (int, f"1 <= x <= {_LONG}"),
    "max_completion_tokens": (int, f"1 <= x <= {_LONG}"),
    "temperature": (float, ">= 0"),
    "top_p": (float, "0 < x <= 1"),
    "top_k": (int, f"-1 or 0 <= x <= {_LONG}"),
    "min_p": (float, "0 <= x <= 1"),
    "repetition_penalty": (float, "> 0"),
    "stop": (tuple[str, ...], "no empty string"),
    "stop_token_ids": (tuple[int, ...], _IDS),
    "ignore_eos": (bool, ""),
    "stream": (bool, ""),
    "stream_options": (dict[str, bool], ""),
    "top_logprobs": (int, "0"),
    "return_token_ids": (bool, ""),
    "return_tokens_as_token_ids": (bool, ""),
    "reasoning_effort": (str, ""),
}
CHAT: dict[str, tuple[Any, str]] = {
    **USED,
    "messages": (Any, ""),
    "tools": (Any, ""),
    "logprobs": (bool, ""),
    "chat_template_kwargs": (dict, "arguments that the template itself reads"),
}
COMPLETION: dict[str, tuple[Any, str]] = {**USED, "prompt": (Any, ""), "logprobs": (Any, "")}
GENERATE: dict[str, tuple[Any, str]] = {
    **USED,
    "token_ids": (tuple[int, ...], _IDS),
    "sampling_params": (dict, ""),
}
# Parameters with fixed values, because other values are not implemented.
FIXED: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "audio": (),
    "prediction": (),
    "features": (),
    "content_parts": (),
}
# Parameters that do not affect a reply here.
IGNORED = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls", "verbosity", "request_id", "cache_salt"),
    *("priority", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"),
    *("add_special_tokens",),
}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"} | dict.fromkeys(
    (500, 503), "server_error"
)


class ApiError(Exception):
    """A refused request, in the error format that OpenAI's clients read."""

    def __init__(self, message: str, param: str | None = None, **more: Any) -> None:
        """Names the invalid parameter, `param`. In `more`, `status` and `code` set the response's
        status and code (default 400).
        """
        super().__init__(message)
        self.status: int = more.pop("status", 400)
        kind = _KINDS.get(self.status, "invalid_request_error")
        error = {"message": printable(message), "type": kind, "param": param}
        self.body = {"error": {"code": None, **error, **more}}


@attrs.frozen(kw_only=True)
class Asked:
    """A parsed call: a chat, or prompts."""

    given: dict[str, Any]  # the call's parameters
    chat: Chat | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    ids: bool = False  # both the prompt and the reply are token ids
    logprobs: bool = False

    def seed_of(self, number: int) -> Seed | None:
        """Returns the seed for the completion with this number, or None for a random seed."""
        seed = self.given.get("seed")
        return None if seed is None else derived_seed((seed >> 32, seed & 0xFFFFFFFF), number)

    def sampling(self, model: ServedModel, prompt: int) -> g.Sampling:
        """Returns the sampling settings for a completion after a prompt of `prompt` tokens. Raises
        ApiError if there is no room after the prompt.
        """
        default = model.sampling
        room = model.length - prompt
        usual = min(max(room, 1), default.max_new_tokens) if self.chat else SHORT
        given = self.given
        wanted = given.get("max_completion_tokens") or given.get("max_tokens") or usual
        if wanted > room:
            raise ApiError(
                f"This model's maximum context length is {model.length} tokens. However, you "
                f"requested {prompt + wanted} tokens ({prompt} in the prompt, {wanted} for the "
                "completion). Please reduce the length of the prompt or completion.",
                "messages" if self.chat else "prompt",
                code="context_length_exceeded",
            )
        ends = frozenset(given.get("stop_token_ids", ()))
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "stop")
        return attrs.evolve(
            default,
            num_generations=1,
            max_new_tokens=wanted,
            top_k=max(given.get("top_k", default.top_k), 0),
            eos_ids=ends if given.get("ignore_eos") else ends | model.eos_ids,
            **{name: given[name] for name in names if name in given},
        )


def check_name(model: ServedModel, name: str | None) -> None:
    """Raises ApiError if a request asks for a different model."""
    if name not in (None, model.name):
        raise ApiError(
            f"there is no model {show(name)}; expected {show(model.name)}",
            "model",
            status=404,
            code="model_not_found",
        )


def read_json(body: bytes) -> dict[str, Any]:
    """Parses a request's body as JSON. Raises ApiError unless it is an object."""
    try:
        found = json.loads(body, parse_constant=lambda name: float(f"{name} is not JSON"))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ApiError(f"the body: expected a JSON object, found {show(found)}")
    return found


def read_chat(body: Mapping[str, Any]) -> Asked:
    """Parses the body of a /v1/chat/completions request."""
    given = read_fields(body, CHAT)
    kwargs = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        kwargs["reasoning_effort"] = given["reasoning_effort"]
    tools = _tools(given.get("tools", []))
    chat = Chat(
        messages=_messages(given.get("messages")),
        tools=() if body.get("tool_choice") == "none" else tools,
        template_kwargs=kwargs,
    )
    return Asked(given=given, chat=chat, logprobs=given.get("logprobs", False))


def read_completion(body: Mapping[str, Any]) -> Asked:
    """Parses the body of a /v1/completions request."""
    given = read_fields(body, COMPLETION)
    logprobs = given.get("logprobs")
    if logprobs not in (None, 0, 1) or isinstance(logprobs, bool):
        raise ApiError(f"logprobs: expected 0 or 1, found {show(logprobs)}", "logprobs")
    prompt = given.get("prompt")
    listed = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = tuple(map(_prompt, prompt if isinstance(prompt, list) and listed else [prompt]))
    return Asked(given=given, prompts=prompts, logprobs=logprobs is not None)


def read_generate(body: Mapping[str, Any]) -> Asked:
    """Parses the body of an /inference/v1/generate request."""
    given = read_fields(body, GENERATE)
    more = read_fields(given.get("sampling_params", {}), {**USED, "logprobs": (Any, "")})
    whole = {**more, **given, "return_token_ids": True}
    return Asked(
        given=whole,
        prompts=(_prompt([*given.get("token_ids", ())], "token_ids"),),
        ids=True,
        logprobs=True,
    )


def read_fields(
    body: Mapping[str, Any],
    used: Mapping[str, tuple[Any, str]],
    fixed: Mapping[str, tuple[Any, ...]] = FIXED,
    ignored: Collection[str] = IGNORED,
) -> dict[str, Any]:
    """Returns the parameters in `used` that the body contains, after checking their types and
    ranges. Raises ApiError for any other parameter, unless it is ignored or has one of its fixed
    values.
    """
    given: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in ignored:
            continue
        if name in used:
            value = [value] if name == "stop" and isinstance(value, str) else value
            given[name] = checked(name, value, *used[name])
        elif name not in fixed:
            near = did_you_mean(name, [*used, *fixed, *ignored])
            raise ApiError(f"Unrecognized request argument supplied: {name}{near}", name)
        elif value not in fixed[name]:
            wanted = " or ".join(map(show, fixed[name])) or "nothing"
            raise ApiError(f"{name} is not supported: expected {wanted}, found {show(value)}", name)
    return given


def checked(param: str, value: Any, kind: Any, within: str = "") -> Any:
    """Returns the value if it has the required type and range, and raises ApiError otherwise."""
    try:
        found = value if kind is Any else rules.structure(value, kind)
        if within and not rules.is_within(found, within):
            raise rules.Mismatch(value, f"{rules.words(kind)}, {within}")
    except rules.Mismatch as error:
        wanted = error.expected.replace("a table", "an object").replace("tables", "objects")
        raise ApiError(f"{param}: expected {wanted}, found {show(value)}", param) from error
    return found


def _prompt(value: Any, name: str = "prompt") -> str | tuple[int, ...]:
    """Parses a prompt: text or token ids. Whether the model has these ids is checked later."""
    ids = isinstance(value, list)
    found = checked(name, value, tuple[int, ...] if ids else str, _IDS if ids else "")
    if not found:
        raise ApiError(f"{name}: expected a text or token ids, found an empty one", name)
    return found


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    with suppress(TypeError, KeyError):
        if all(isinstance(tool["function"]["name"], str) for tool in value):
            return tuple(value)
    raise ApiError("tools: expected a list of functions with names", "tools")


def _messages(value: Any) -> tuple[Message, ...]:
    """Parses a chat's messages, and returns them in the form that templates use."""
    if isinstance(value, list):
        value = [_renamed(each) if isinstance(each, dict) else each for each in value]
    fault = prompt_fault(value) if isinstance(value, list) else "expected a list of messages"
    if fault:
        raise ApiError(f"messages: {fault}", "messages")
    messages = conversation(value)
    names = {}
    try:
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"] |= {"arguments": _arguments(call["function"]["arguments"])}
                names[call.get("id")] = call["function"]["name"]
            if message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
    except (TypeError, KeyError, AttributeError) as error:
        raise ApiError("messages: expected function calls in tool_calls", "messages") from error
    return messages


def _renamed(message: dict[str, Any]) -> dict[str, Any]:
    """Renames a message's fields to the names that templates use."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    return {
        **message,
        "role": "system" if message.get("role") == "developer" else message.get("role"),
        "content": message.get("content") or "",
        "reasoning_content": thoughts if isinstance(thoughts, str) else None,
    }


def _arguments(value: Any) -> Any:
    """Parses a call's arguments as an object, as templates expect. Other arguments are returned
    unchanged.
    """
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value


@attrs.frozen(eq=False, kw_only=True)
class Answer:
    """Writes the response to a call."""

    asked: Asked
    model: ServedModel
    prompts: Sequence[tuple[int, ...]]  # the token ids of each prompt
    head: dict[str, Any] = attrs.field(
        factory=lambda: {"id": secrets.token_hex(16), "created": int(time.time())}
    )

    def whole(self, rows: Sequence[Row], replies: Sequence[Reply]) -> dict[str, Any]:
        """Returns the full answer, with all completions."""
        choices = []
        for index, (row, reply) in enumerate(zip(rows, replies, strict=True)):
            finish = "tool_calls" if reply.calls else row.finish
            choice = {"index": index, "finish_reason": finish, **self._tokens(row.tokens, row.logp)}
            if self.asked.chat:
                message = {"refusal": None, **wire_message(reply)}
                choice["message"] = {k: v for k, v in message.items() if v or k == "content"}
            elif not self.asked.ids:
                choice["text"] = reply.content
            choices.append(choice)
        return self._around(choices, "", first=True) | self.usage(
            sum(len(row.tokens) for row in rows)
        )

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        tokens: Sequence[int] = (),
        logp: Sequence[float] = (),
        *,
        finish: str | None = None,
        first: bool = False,
    ) -> dict[str, Any]:
        """Returns one streamed chunk of a chat message or a text."""
        choice = {"index": index, "finish_reason": finish, **self._tokens(tokens, logp)}
        said = {"delta": dict(delta)} if self.asked.chat else {"text": delta.get("content", "")}
        return self._around([choice | said], ".chunk", first=first)

    def usage_chunk(self, sampled: int) -> dict[str, Any]:
        """Returns the streamed chunk that contains the token counts."""
        return self._around([], ".chunk", first=False) | self.usage(sampled)

    def usage(self, sampled: int) -> dict[str, Any]:
        """Returns the token counts of the prompts and completions."""
        prompt = sum(map(len, self.prompts))
        counts = {"prompt_tokens": prompt, "completion_tokens": sampled}
        return {"usage": {**counts, "total_tokens": prompt + sampled}}

    def _around(self, choices: list[dict[str, Any]], part: str, *, first: bool) -> dict[str, Any]:
        """Wraps choices in an answer or a streamed chunk. The first chunk contains the prompt's
        ids, if the call requests token ids.
        """
        if self.asked.ids:
            return {"request_id": self.head["id"], "choices": choices}
        kind = f"chat.completion{part}" if self.asked.chat else "text_completion"
        more = {"object": kind, "model": self.model.name, "choices": choices}
        if first and self.asked.given.get("return_token_ids"):
            more["prompt_token_ids"] = self.prompts[0]
        return {**self.head, **more}

    def _tokens(self, tokens: Sequence[int], logp: Sequence[float]) -> dict[str, Any]:
        """Returns a choice's fields with token ids and log-probs."""
        given = self.asked.given
        found: dict[str, Any] = {"logprobs": None}
        if given.get("return_token_ids"):
            found["token_ids"] = list(tokens)
        if not self.asked.logprobs:
            return found
        if given.get("return_token_ids") or given.get("return_tokens_as_token_ids"):
            names = [f"token_id:{token}" for token in tokens]
        else:
            names = [self.model.decoder.part([token]) for token in tokens]
        if not (self.asked.chat or self.asked.ids):
            return found | {"logprobs": {"tokens": names, "token_logprobs": list(logp)}}
        entries = [
            {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
            for name, value in zip(names, logp, strict=True)
        ]
        return found | {"logprobs": {"content": entries}}


def wire_message(reply: Reply) -> dict[str, Any]:
    """Returns a reply's fields in the form that clients read: call arguments are JSON texts."""
    message = {"reasoning": reply.thoughts or None, **reply.message}
    calls = []
    for index, call in enumerate(reply.calls):
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
        calls.append({**call, "index": index, "function": function})
    return message | {"content": reply.content or (None if calls else ""), "tool_calls": calls}


def delta_of(reply: Reply) -> dict[str, Any]:
    """Returns the fields that stream a new part of a reply."""
    return {name: value for name, value in wire_message(reply).items() if value and name != "role"}
