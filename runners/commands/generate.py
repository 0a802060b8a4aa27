"""`grpo generate`: one prompt as a stream, or a file of prompts in batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runners.commands.base import HELP, INTERRUPTED, ends_with_a_line
from runners.commands.chat import show_reply
from runners.commands.options import (
    MODEL,
    PROMPT,
    RAW,
    SAMPLING,
    TOOLS,
    TOOLS_OF,
    check_stops,
    open_model,
    open_tools,
    options,
    resolve_prompt,
    row_of,
    sampling_of,
)
from runners.errors import UserError
from runners.machine.terminal import echo

if TYPE_CHECKING:
    from runners.data.prompts import Message
    from runners.environments.environments import Environments
    from runners.inference.inference_model import InferenceModel
    from runners.inference.text_generation import Completion, Speed

_EXAMPLES = """\
\b
Examples:
  grpo generate outputs/my-first "What is 17 × 3?"
  grpo generate Qwen/Qwen2.5-0.5B-Instruct --adapter outputs/lora/final "Hello" --temperature 0
  grpo generate Qwen/Qwen2-VL-2B-Instruct "What is this?" --image photo.jpg
  grpo generate MODEL --prompts questions.jsonl --column question --out answers.jsonl
  echo "Say hi." | grpo generate MODEL - > reply.txt

\b
The text goes to stdout; speed and memory go to stderr. With --prompts, or --num above 1, stdout gets a JSON
object a line: prompt, completion, finish (stop, length or interrupted), tokens. With tools it also has
messages, turns, calls, failures and, if the environment gives one, reward.
"""


@click.command("generate", context_settings=HELP, epilog=_EXAMPLES)
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--prompts", default="", metavar="FILE", help="Many prompts: .txt (one a line), rows, or - (stdin)."
)
@click.option("--column", default="prompt", show_default=True, help="The rows' column: a text, or messages.")
@click.option(
    "--num", type=click.IntRange(1), default=1, show_default=True, help="Completions of each prompt."
)
@click.option(
    "--batch", type=click.IntRange(1), default=256, show_default=True, help="Completions at a time."
)
@click.option("--out", default="", metavar="FILE", help="Write the JSON lines here instead of stdout.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="FILE",
    help="An image, before PROMPT's text; may be given more than once (extra vlm).",
)
@options(PROMPT, SAMPLING, MODEL, TOOLS, TOOLS_OF, RAW)
@ends_with_a_line
def generate_command(
    model: str,
    prompt: str | None,
    prompts: str,
    column: str,
    num: int,
    batch: int,
    out: str,
    images: tuple[str, ...],
    **values: Any,
) -> None:
    """Let a model answer one prompt, or many.

    MODEL is a folder, a run's folder, a name on the Hub, a folder of adapters, or "embedded". PROMPT is a
    text, or - for all of standard input. A model that was trained here is asked as in training, unless an
    option says otherwise.
    """
    if (prompt is None) == (not prompts):
        raise UserError("wanted either PROMPT or --prompts FILE")
    if images and (prompts or num > 1 or out or values["adapter"] or values["tools"] or values["factory"]):
        raise UserError(
            "--image goes with one PROMPT; leave --prompts, --num, --out, --adapter, --tools and --env out"
        )
    text = ""
    if prompts:
        from runners.data.prompt_files import read_prompts

        conversations = read_prompts(prompts, column, values["system"] or "")
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        if not text.strip():
            raise UserError("the prompt is empty")
        conversations = [[{"role": "user", "content": text}]]
    if images:
        _seeing(model, conversations[0], images, values)
        return
    row_of(values)
    loaded = open_model(model, values)
    values = resolve_prompt(values, loaded.prompt)
    conversations = [_with_system(messages, values["system"]) for messages in conversations]
    environments = open_tools(model, loaded, values)
    if prompts or num > 1 or out:
        rows = _played if environments else _completed
        _many(partial(rows, loaded, conversations, num, batch, values, environments), out)
    elif environments:
        _one_with_tools(loaded, environments, text, values)
    else:
        _one(loaded, conversations[0], values)


def _with_system(messages: Sequence[Message], system: str) -> list[Message]:
    """The messages with `system` in front, unless they already have a system message."""
    own = not system.strip() or messages[0]["role"] == "system"
    return list(messages) if own else [{"role": "system", "content": system}, *messages]


def _one(model: InferenceModel, messages: Sequence[Message], values: dict[str, Any]) -> None:
    """Stream a reply to stdout."""
    from runners.data.prompts import render
    from runners.inference.text_generation import stream
    from runners.tokenization.text import TextDecoder

    decoder = TextDecoder(model.tokenizer)
    _, tokens = render(model.tokenizer, messages, values["nudge"], template_kwargs=values["template_kwargs"])
    find_stop = decoder.find_stop(values["stop"])
    _show(
        partial(stream, model, tokens, sampling_of(values), decoder=decoder, find_stop=find_stop),
        values,
    )


def _seeing(name: str, messages: Sequence[Message], images: Sequence[str], values: dict[str, Any]) -> None:
    """Stream the reply of a vision-language model to stdout."""
    check_stops(values)
    from runners.machine import startup

    machine = startup.prepare()
    from runners.inference.vision import load_vision, stream_images

    model = load_vision(
        name,
        machine,
        trust_remote_code=values["trust_remote_code"],
        with_prompt=not values["no_prompt_file"],
        note=partial(echo, err=True),
    )
    values = resolve_prompt(values, model.prompt)
    messages = _with_system(messages, values["system"])
    how = {name: values[name] for name in ("nudge", "stop", "template_kwargs")}
    _show(partial(stream_images, model, messages, images, sampling_of(values), **how), values)


def _show(pieces: Callable[..., Iterator[str | Completion]], values: dict[str, Any]) -> None:
    """Shows a reply as it comes, then its speed; Ctrl-C ends it. `pieces` takes `stopped` and `speed`."""
    from runners.inference.text_generation import Speed
    from runners.machine.signals import Interrupts

    speed = Speed()
    speed.start()
    with Interrupts() as interrupts:
        echo(values["nudge"], nl=False, raw=values["raw"])
        for piece in pieces(stopped=lambda: interrupts.stopped, speed=speed):
            if isinstance(piece, str):
                echo(piece, nl=False, raw=values["raw"])
    echo()
    echo(speed.line(), err=True)
    if interrupts.stopped:
        sys.exit(INTERRUPTED)


def _one_with_tools(
    model: InferenceModel, environments: Environments, text: str, values: dict[str, Any]
) -> None:
    """Stream a reply and its turns; Ctrl-C ends it."""
    from runners.inference.text_generation import Speed
    from runners.inference.tool_conversation import ToolConversation
    from runners.machine.signals import Interrupts

    how = {key: values[key] for key in ("system", "nudge", "stop", "template_kwargs")}
    conversation = ToolConversation(model, sampling_of(values), environments, columns=row_of(values), **how)
    speed = Speed()
    speed.start()
    with Interrupts() as interrupts:
        pieces = conversation.reply(text, stopped=lambda: interrupts.stopped, speed=speed)
        show_reply(pieces, raw=values["raw"])
    echo(speed.line(), err=True)
    if interrupts.stopped:
        sys.exit(INTERRUPTED)


def _many(rows: Callable[..., Iterator[dict[str, Any]]], out: str) -> None:
    """Writes a JSON line for each completion when its batch is done; Ctrl-C ends the current batch."""
    from runners.files.json_lines import json_line
    from runners.inference.text_generation import Speed
    from runners.machine.signals import Interrupts

    speed = Speed()
    speed.start()
    with Interrupts() as interrupts, _sink(out) as sink:
        for row in rows(stopped=lambda: interrupts.stopped, speed=speed):
            sink(json_line(row))
    echo(speed.line(), err=True)
    if interrupts.stopped:
        sys.exit(INTERRUPTED)


def _completed(
    model: InferenceModel,
    conversations: Sequence[Sequence[Message]],
    num: int,
    batch: int,
    values: dict[str, Any],
    environments: None,
    *,
    stopped: Callable[[], bool],
    speed: Speed,
) -> Iterator[dict[str, Any]]:
    """The rows of completions without tools."""
    from runners.data.prompts import render
    from runners.inference.text_generation import generate_batches
    from runners.tokenization.text import TextDecoder

    decoder = TextDecoder(model.tokenizer)
    tokens = [
        render(model.tokenizer, messages, values["nudge"], template_kwargs=values["template_kwargs"])[1]
        for messages in conversations
    ]
    groups = generate_batches(
        model,
        tokens,
        sampling_of(values),
        decoder=decoder,
        num_generations=num,
        find_stop=decoder.find_stop(values["stop"]),
        max_batch=batch,
        stopped=stopped,
        speed=speed,
    )
    for messages, completions in zip(conversations, groups, strict=False):  # fewer after Ctrl-C
        for completion in completions:
            yield {
                "prompt": _shown(messages, values),
                "completion": values["nudge"] + completion.text,
                "finish": completion.finish,
                "tokens": len(completion.tokens),
            }


def _shown(messages: Sequence[Message], values: dict[str, Any]) -> Any:
    """The prompt as a row shows it, without the system message that all prompts share."""
    plain = list(messages) == _with_system(messages[-1:], values["system"])
    return messages[-1]["content"] if plain else list(messages)


def _played(
    model: InferenceModel,
    conversations: Sequence[Sequence[Message]],
    num: int,
    batch: int,
    values: dict[str, Any],
    environments: Environments,
    *,
    stopped: Callable[[], bool],
    speed: Speed,
) -> Iterator[dict[str, Any]]:
    """The rows of conversations with tools."""
    from runners.inference.tool_conversation import play_prompts

    how = {key: values[key] for key in ("nudge", "stop", "template_kwargs")}
    found = play_prompts(
        model,
        environments,
        conversations,
        sampling_of(values),
        columns=row_of(values),
        num_generations=num,
        max_batch=batch,
        stopped=stopped,
        speed=speed,
        **how,
    )
    for messages, row in found:
        yield {"prompt": _shown(messages, values), **row}


@contextmanager
def _sink(out: str) -> Iterator[Callable[[str], None]]:
    """The function that writes a line: to the file `out`, or to standard output."""
    if not out:
        yield echo
        return
    try:
        with Path(out).open("w", encoding="utf-8") as file:

            def write(line: str) -> None:
                file.write(f"{line}\n")
                file.flush()

            yield write
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from error
