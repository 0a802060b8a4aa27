"""What clients send and get: OpenAI's completions and chats, and vLLM's ids in, ids out.

A parameter is used, refused by name, or known not to change a reply.
"""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

import grpo_fn as g
from runners.config import rules
from runners.config.rules import key
from runners.data.messages import ROLES, Message
from runners.engines.engine import Row, Seed
from runners.errors import did_you_mean, printable, show
from runners.serve.chat import Chat, Reply, ServedModel
from runners.serve.sessions import derived_seed
from runners.tokenization.text import TextDecoder

SHORT = 16  # tokens of a completion that names no limit, as with OpenAI and vLLM
# Parameters that may only have these values: others would change the reply, and cannot.
FIXED: dict[str, tuple[Any, ...]] = {
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
# Parameters that do not change a reply here.
IGNORED = {
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls", "verbosity", "request_id", "cache_salt"),
    *("priority", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"),
    *("add_special_tokens",),
}


class ApiError(Exception):
    """A refusal, as OpenAI's clients read it."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        """`param`: the parameter at fault."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error's object."""
        kinds = {429: "rate_limit_error", 401: "authentication_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        error = {
            "message": printable(str(self)),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


@attrs.frozen(kw_only=True)
class Asked:
    """The parameters of a call, for all endpoints; None: as the server says."""

    model: str = key("", "")
    messages: tuple[Message, ...] = ()  # a chat
    prompts: tuple[str | tuple[int, ...], ...] = ()  # completions; the one of ids in, ids out
    tools: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = attrs.field(factory=dict)
    only_ids: bool = False  # ids in, ids out
    n: int | None = key(None, "", "1 <= x <= 128")
    seed: int | None = key(None, "", "0 <= x <= 9223372036854775807")
    max_tokens: int | None = key(None, "", "1 <= x <= 2147483647")
    temperature: float | None = key(None, "", ">= 0")
    top_p: float | None = key(None, "", "0 < x <= 1")
    top_k: int | None = key(None, "", "-1 or 0 <= x <= 2147483647")
    min_p: float | None = key(None, "", "0 <= x <= 1")
    repetition_penalty: float | None = key(None, "", "> 0")
    stop: tuple[str, ...] | None = key(None, "", "no empty string")
    stop_token_ids: tuple[int, ...] | None = key(None, "", "each: 0 <= x <= 2147483647")
    ignore_eos: bool | None = key(None, "")
    stream: bool | None = key(None, "")
    stream_usage: bool = False  # whether a stream ends with what it took
    logprobs: bool | int | None = None  # a number of others: only that of the token is known
    top_logprobs: int | None = key(None, "", "0")
    return_token_ids: bool | None = key(None, "")
    return_tokens_as_token_ids: bool | None = key(None, "")

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probs are wanted; `logprobs: 0` is those of the tokens alone."""
        return self.logprobs is not None and self.logprobs is not False

    @property
    def names_ids(self) -> bool:
        """Whether tokens are written as token_id:N."""
        return bool(self.return_token_ids or self.return_tokens_as_token_ids)

    @property
    def chat(self) -> Chat:
        """The chat."""
        return Chat(messages=self.messages, tools=self.tools, template_kwargs=self.template_kwargs)

    def seed_of(self, number: int) -> Seed | None:
        """The seed of a completion; None: any."""
        if self.seed is None:
            return None
        return derived_seed((self.seed >> 32, self.seed & 0xFFFFFFFF), number)

    def sampling(self, model: ServedModel, prompt: int) -> g.Sampling:
        """How to sample behind a prompt of so many tokens. Raises ApiError if there is no room."""
        room = model.length - prompt
        usual = min(room, model.sampling.max_new_tokens) if self.messages else SHORT
        wanted = self.max_tokens or usual
        if wanted > room or room < 1:
            raise ApiError(
                f"This model's maximum context length is {model.length} tokens. However, you "
                f"requested {prompt + max(wanted, 1)} tokens ({prompt} in the prompt, "
                f"{max(wanted, 1)} for the completion). Please reduce the length of the prompt "
                "or completion.",
                param="messages" if self.messages else "prompt",
                code="context_length_exceeded",
            )
        default = model.sampling
        ends = frozenset(self.stop_token_ids or ())
        return attrs.evolve(
            default,
            num_generations=1,
            max_new_tokens=wanted,
            temperature=_or(self.temperature, default.temperature),
            top_p=_or(self.top_p, default.top_p),
            top_k=max(_or(self.top_k, default.top_k), 0),
            min_p=_or(self.min_p, default.min_p),
            repetition_penalty=_or(self.repetition_penalty, default.repetition_penalty),
            eos_ids=ends if self.ignore_eos else ends | model.eos_ids,
            stop=_or(self.stop, default.stop),
        )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def read_json(body: bytes) -> dict[str, Any]:
    """A request's body. Raises ApiError unless it is an object."""
    try:
        found = json.loads(body, parse_constant=_not_finite)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body cannot be read as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ApiError(f"the body: expected a JSON object, found {show(found)}")
    return found


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def read_chat(body: Mapping[str, Any]) -> Asked:
    """The parameters of /v1/chat/completions."""
    values = dict(body)
    most = values.pop("max_completion_tokens", None)
    if most is not None:
        values["max_tokens"] = most
    messages = _messages(values.pop("messages", None))
    choice = values.pop("tool_choice", None)
    tools = _tools(values.pop("tools", None))
    if choice not in (None, "auto", "none"):
        raise ApiError(f"expected auto or none, found {show(choice)}", param="tool_choice")
    kwargs = values.pop("chat_template_kwargs", None) or {}
    if not isinstance(kwargs, dict) or not rules.is_within(kwargs, _TEMPLATE):
        raise ApiError(f"expected a table of {_TEMPLATE}", param="chat_template_kwargs")
    effort = values.pop("reasoning_effort", None)
    if effort is not None:
        kwargs = {**kwargs, "reasoning_effort": effort}
    shown = () if choice == "none" else tools
    asked = attrs.evolve(_read(values, bool), messages=messages, tools=shown)
    return attrs.evolve(asked, template_kwargs=kwargs)


def read_completion(body: Mapping[str, Any]) -> Asked:
    """The parameters of /v1/completions."""
    values = dict(body)
    prompt = values.pop("prompt", None)
    listed = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(_prompt(each, "prompt") for each in (prompt if listed else [prompt]))
    return attrs.evolve(_read(values, int), prompts=prompts)


def read_generate(body: Mapping[str, Any]) -> Asked:
    """The parameters of /inference/v1/generate."""
    values = dict(body)
    sampling = values.pop("sampling_params", None) or {}
    if not isinstance(sampling, dict):
        raise ApiError(f"expected an object, found {show(sampling)}", param="sampling_params")
    prompt = values.pop("token_ids", None)
    if not isinstance(prompt, list):
        raise ApiError(f"expected a list of token ids, found {show(prompt)}", param="token_ids")
    prompts = (_prompt(prompt, "token_ids"),)
    asked = _read({**sampling, **values}, int)
    return attrs.evolve(asked, prompts=prompts, only_ids=True, logprobs=True, return_token_ids=True)


_TEMPLATE = "what the template itself reads"


def _read(values: Mapping[str, Any], logprobs: type) -> Asked:
    """The plain parameters, checked; `logprobs` of type bool, or a number of others."""
    fields = attrs.fields_dict(Asked)
    found: dict[str, Any] = {}
    for name, value in values.items():
        known = fields.get(name)
        if value is None or name in IGNORED:
            continue
        if name == "stream_options" and isinstance(value, dict):
            found["stream_usage"] = bool(value.get("include_usage"))
        elif name in FIXED:
            if value not in FIXED[name]:
                wanted = " or ".join(map(show, FIXED[name])) or "nothing"
                raise ApiError(
                    f"{name} is not supported: expected {wanted}, found {show(value)}", param=name
                )
        elif name == "logprobs":
            if type(value) is not logprobs or (logprobs is int and value not in (0, 1)):
                wanted = "true or false" if logprobs is bool else "0 or 1: others are not known"
                raise ApiError(f"logprobs: expected {wanted}, found {show(value)}", param=name)
            found[name] = value
        elif known is None or not known.metadata:
            near = did_you_mean(name, [*fields, *FIXED, *IGNORED])
            raise ApiError(f"Unrecognized request argument supplied: {name}{near}", param=name)
        else:
            if name == "stop" and isinstance(value, str):
                value = [value]
            try:
                found[name] = rules.check(value, known)
            except rules.Mismatch as error:
                raise ApiError(f"{name}: {error.reason(value)}", param=name) from error
    return Asked(**found)


def _text(value: Any, param: str) -> str:
    try:
        return rules.structure(value, str)
    except rules.Mismatch as error:
        raise ApiError(f"{param}: {error.reason(value)}", param=param) from error


def _prompt(value: Any, param: str) -> str | tuple[int, ...]:
    """A prompt, text or ids; whether the model has these is checked later."""
    if isinstance(value, list):
        if value and all(type(each) is int and 0 <= each <= rules.INT_MAX for each in value):
            return tuple(value)
        raise ApiError(f"{param}: expected token ids, found {show(value)}", param=param)
    text = _text(value, param)
    if not text:
        raise ApiError(f"{param}: expected a text or token ids, found an empty one", param=param)
    return text


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    tools: list[Any] = value if isinstance(value, list) else [None]
    functions = [each.get("function") for each in tools if isinstance(each, dict)]
    names = [each.get("name") for each in functions if isinstance(each, dict)]
    if len(names) != len(tools) or not all(isinstance(name, str) and name for name in names):
        raise ApiError("tools: expected a list of functions with names", param="tools")
    return tuple(tools)


def _messages(value: Any) -> tuple[Message, ...]:
    """A chat's messages, as the template takes them."""
    if not isinstance(value, list) or not value:
        raise ApiError(f"messages: expected a list, found {show(value)}", param="messages")
    found: list[Message] = []
    names: dict[Any, str] = {}  # of the functions, by the ids of their calls
    for number, each in enumerate(value):
        message = _message(each, f"messages[{number}]")
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
        found.append(message)
    return tuple(found)


def _message(value: Any, param: str) -> Message:
    if not isinstance(value, dict):
        raise ApiError(f"{param}: expected an object, found {show(value)}", param=param)
    role = "system" if value.get("role") == "developer" else value.get("role")
    if role not in ROLES:
        near = did_you_mean(str(role), ROLES)
        raise ApiError(
            f"{param}.role: expected one of {', '.join(ROLES)}, found {show(role)}{near}",
            param=f"{param}.role",
        )
    message: Message = {"role": role, "content": _content(value.get("content"), f"{param}.content")}
    thoughts = value.get("reasoning_content") or value.get("reasoning")
    texts = {"name": value.get("name"), "tool_call_id": value.get("tool_call_id")}
    for name, text in {**texts, "reasoning_content": thoughts}.items():
        if text is not None:
            message[name] = _text(text, f"{param}.{name}")
    calls = value.get("tool_calls")
    if calls:
        message["tool_calls"] = _calls(calls, f"{param}.tool_calls")
    return message


def _content(value: Any, param: str) -> str:
    """The text of a content: a text, its parts, or nothing."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return _text(value, param)
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ApiError(f"{param}: expected parts of text, found {show(kind)}", param=param)
    return "".join(_text(part.get("text", part.get("refusal")), param) for part in value)


def _calls(value: Any, param: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message, with objects for arguments."""
    try:
        calls = [(call.get("id"), call["function"]) for call in value]
        made = [(name, function["name"], function["arguments"]) for name, function in calls]
        read = [(*call[:2], _arguments(call[2])) for call in made]
    except (TypeError, KeyError, AttributeError) as error:
        raise ApiError(f"{param}: expected calls of functions", param=param) from error
    return [
        {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}
        for name, function, arguments in read
    ]


def _arguments(value: Any) -> Any:
    """A call's arguments as an object, for templates; as they are if they are none."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, dict) else value


@attrs.frozen(eq=False, kw_only=True)
class Answer:
    """Writes what goes back for a call."""

    asked: Asked
    model: str
    decoder: TextDecoder
    prompts: Sequence[tuple[int, ...]]  # ids, of each of the prompts
    name: str = attrs.field(factory=lambda: secrets.token_hex(16))
    created: int = attrs.field(factory=lambda: int(time.time()))

    def whole(self, rows: Sequence[Row], replies: Sequence[Reply]) -> dict[str, Any]:
        """The answer, with all completions."""
        choices = [
            self._choice(index, row, reply)
            for index, (row, reply) in enumerate(zip(rows, replies, strict=True))
        ]
        sampled = sum(len(row.tokens) for row in rows)
        if self.asked.only_ids:
            return {"request_id": self.name, "choices": choices, "usage": self._usage(sampled)}
        kind = "chat.completion" if self.asked.messages else "text_completion"
        return {
            **self._head(kind),
            **self._prompt_ids(),
            "choices": choices,
            "usage": self._usage(sampled),
        }

    def chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        tokens: Sequence[int],
        logp: Sequence[float],
        finish: str | None,
        *,
        first: bool,
    ) -> dict[str, Any]:
        """A piece of a stream: of a chat's message, or of a text."""
        chat = bool(self.asked.messages)
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice |= {"delta": dict(delta)} if chat else {"text": delta.get("content", "")}
        choice |= self._tokens(tokens, logp)
        kind = "chat.completion.chunk" if chat else "text_completion"
        more = self._prompt_ids() if first else {}
        return {**self._head(kind), **more, "choices": [choice]}

    def usage_chunk(self, sampled: int) -> dict[str, Any]:
        """The piece of a stream that says what it took."""
        kind = "chat.completion.chunk" if self.asked.messages else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self._usage(sampled)}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.name}" if self.asked.messages else f"cmpl-{self.name}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[0]} if self.asked.return_token_ids else {}

    def _usage(self, sampled: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _choice(self, index: int, row: Row, reply: Reply) -> dict[str, Any]:
        finish = "tool_calls" if reply.calls else row.finish
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        if self.asked.messages:
            choice["message"] = {"role": "assistant", "refusal": None, **wire_message(reply)}
        elif not self.asked.only_ids:
            choice["text"] = reply.content
        return choice | self._tokens(row.tokens, row.logp)

    def _tokens(self, tokens: Sequence[int], logp: Sequence[float]) -> dict[str, Any]:
        """The part of a choice about its tokens."""
        found: dict[str, Any] = {"logprobs": None}
        if self.asked.return_token_ids:
            found["token_ids"] = list(tokens)
        if not self.asked.has_logprobs:
            return found
        names = [self._name(token) for token in tokens]
        if self.asked.messages or self.asked.only_ids:
            entries = zip(names, logp, strict=True)
            found["logprobs"] = {
                "content": [
                    {
                        "token": name,
                        "logprob": value,
                        "bytes": None if self.asked.names_ids else list(name.encode()),
                        "top_logprobs": [],
                    }
                    for name, value in entries
                ]
            }
        else:
            found["logprobs"] = {
                "tokens": names,
                "token_logprobs": list(logp),
                "top_logprobs": None,
                "text_offset": [],
            }
        return found

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.asked.names_ids else self.decoder.part([token])


def wire_message(reply: Reply) -> dict[str, Any]:
    """A reply's fields as clients read them: the arguments of calls are texts."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"]),
            },
        }
        for call in reply.calls
    ]
    fields: dict[str, Any] = {"content": reply.content if reply.content or not calls else None}
    if reply.thoughts:
        fields |= {"reasoning": reply.thoughts, "reasoning_content": reply.thoughts}
    return fields | ({"tool_calls": calls} if calls else {})


def check_prompt(prompt: tuple[int, ...], model: ServedModel) -> None:
    """Raise ApiError for ids that the model does not have."""
    most = model.vocabulary
    if most is not None and max(prompt, default=0) >= most:
        raise ApiError(
            f"prompt: expected token ids below {most}, found {max(prompt)}", param="prompt"
        )
