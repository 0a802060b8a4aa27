"""Defines `grpo generate`, which streams the reply to one prompt or answers a file of prompts in
batches, and `grpo chat`, a conversation on the terminal.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runners.commands.base import INTERRUPTED, command, flag, option, refuse
from runners.commands.options import (
    MODEL,
    PROMPT,
    SAMPLING,
    TOOLS,
    TOOLS_OF,
    TRUST,
    open_model,
    open_tools,
    resolve_prompt,
    sampling_of,
)
from runners.files.json_files import json_line
from runners.machine.signals import Interrupts
from runners.machine.terminal import echo, echo_output, echo_text

if TYPE_CHECKING:
    from runners.data.messages import Message
    from runners.environments.environments import Environments
    from runners.inference.inference_model import InferenceModel
    from runners.inference.text_generation import Conversation, Speed

PROMPT_SIGN = ">>> "
_COMMANDS = """\
  /help    show these commands
  /clear   start a new conversation
  /exit    quit (or Ctrl-D)
  Ctrl-C   stop the reply; press it again before the next message to quit
"""


@command(
    "generate",
    click.argument("model"),
    click.argument("prompt", required=False),
    option(
        "--prompts=FILE",
        "File with prompts: .txt (one per line), rows, or - (stdin).",
        default="",
    ),
    option(
        "--column",
        "Column with the prompts, as texts or lists of messages.",
        default="prompt",
        show_default=True,
    ),
    option("--num", "Completions per prompt.", click.IntRange(1), 1, show_default=True),
    option(
        "--batch",
        "Number of completions decoded together.",
        click.IntRange(1),
        256,
        show_default=True,
    ),
    flag("--raw", "Continue the text without a chat template, for base models."),
    option("--out=FILE", "Write JSON lines to this file instead of stdout.", default=""),
    option(
        "--image as images=FILE",
        "Image to place before PROMPT's text; may be repeated (requires the `vlm` extra).",
        multiple=True,
    ),
    PROMPT,
    SAMPLING,
    MODEL,
    TRUST,
    TOOLS,
    TOOLS_OF,
    notes="""\
\b
Examples:
  grpo generate outputs/my-first "What is 17 × 3?"
  grpo generate Qwen/Qwen2.5-0.5B-Instruct --adapter outputs/lora/final "Hello" --temperature 0
  grpo generate Qwen/Qwen2-VL-2B-Instruct "What is this?" --image photo.jpg
  grpo generate MODEL --prompts questions.jsonl --column question --out answers.jsonl
  echo "Say hi." | grpo generate MODEL - > reply.txt

\b
The text goes to stdout; speed and memory go to stderr. With --prompts, tools, or --num above 1,
stdout receives one JSON object per line, with prompt, completion, finish (stop, length or
interrupted) and tokens. With tools, it also contains messages, turns, calls, failures and, if the
environment returns one, reward. """,
)
def generate_command(
    model: str,
    prompt: str | None,
    prompts: str,
    num: int,
    out: str,
    images: tuple[str, ...],
    **values: Any,
) -> None:
    """Generate completions for one prompt or many.

    MODEL is a model folder, a run's folder, a Hub name, a folder with adapters, or "embedded". PROMPT is a
    text, or - for all of standard input. A model that was trained with grpo_fn uses the prompt format of its
    training, unless options override it.
    """
    tools = values["tools"] or values["factory"]
    refuse(
        ((prompt is None) == (not prompts), "expected either PROMPT or --prompts FILE"),
        (
            images and (prompts or num > 1 or out or tools or values["config"]),
            "--image requires a single PROMPT, without --prompts, --num, --out or tools",
        ),
        (
            values["raw"] and (values["system"] or images or tools),
            "--raw continues a text and cannot be combined with --system, --image, --tools or "
            "--env",
        ),
    )
    from runners.data.messages import conversation, read_prompts

    text = ""
    if prompts:
        conversations = read_prompts(prompts, values["column"], values["system"] or "")
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        refuse((not text.strip(), "the prompt is empty"))
        conversations = [conversation(text)]
    loaded = open_model(model, values, images=bool(images))
    values = resolve_prompt(values, loaded.prompt)
    environments = open_tools(loaded, values)
    from runners.images.image_files import ImageFile
    from runners.inference.text_generation import Speed

    speed = Speed()
    with Interrupts() as interrupts:  # Ctrl-C ends the current batch, or the reply

        def should_stop() -> bool:
            return interrupts.stopped

        if prompts or num > 1 or out or environments:
            rows = _rows(
                loaded,
                conversations,
                num,
                values,
                environments,
                should_stop=should_stop,
                speed=speed,
            )
            with open(out or os.devnull, "w", encoding="utf-8") as file:
                write = (
                    partial(print, file=file, flush=True) if out else partial(echo_output, nl=True)
                )
                for row in rows:
                    write(json_line(row))
        else:
            shown = [ImageFile(name, path=Path(name).expanduser()) for name in images]
            chat = open_conversation(loaded, values)
            show_reply(chat.reply(text, images=shown, should_stop=should_stop, speed=speed))
    echo(speed.line(), err=True)
    if interrupts.stopped:
        sys.exit(INTERRUPTED)


def _rows(
    model: "InferenceModel",
    conversations: "Sequence[Sequence[Message]]",
    num: int,
    values: dict[str, Any],
    environments: "Environments | None",
    *,
    should_stop: Callable[[], bool],
    speed: "Speed",
) -> Iterator[dict[str, Any]]:
    """Yields a row per completion, or per conversation with tools, batch by batch."""
    import attrs

    from runners.data.messages import conversation
    from runners.inference.text_generation import generation_key, sample_batches

    system = values["system"]
    examples = [
        model.example(
            conversation(each, system),
            nudge=values["nudge"],
            template_kwargs=values["template_kwargs"],
            raw=values["raw"],
            tools=environments.chat.schemas if environments else (),
            columns=values["row"],
            most=values["max_tokens"],
        )
        for each in conversations
    ]
    batches = sample_batches(
        model.engine,
        examples,
        attrs.evolve(sampling_of(values, model), num_generations=num),
        key=generation_key(values["seed"]),
        decoder=model.decoder,
        nudge=values["nudge"],
        rows=values["batch"],
        environments=environments,
        should_stop=should_stop,
    )
    for done in batches:
        speed.add(done)
        rewards = None
        if environments is not None and done.played is not None:
            rewards = environments.own_rewards(done.played)
        for row, text in enumerate(done.texts):
            messages = done.examples[row // num].messages
            # Without the system message that all prompts share.
            is_text = messages == conversation(messages[-1:], system)
            cells: dict[str, Any] = {
                "prompt": messages[-1]["content"] if is_text else list(messages),
                "completion": text,
                "finish": done.finish[row],
                "tokens": done.lengths[row],
            }
            if done.played is not None:
                episode = done.played[row]
                cells["messages"] = list(episode.messages)
                cells |= {name: episode.counts[name] for name in ("turns", "calls", "failures")}
                cells |= {} if rewards is None else {"reward": rewards[row]}
                cells |= {"fault": episode.fault} if episode.fault else {}
            yield cells


@command(
    "chat",
    click.argument("model"),
    PROMPT,
    SAMPLING,
    MODEL,
    TRUST,
    notes=f"\b\nWhile chatting:\n{_COMMANDS}",
)
def chat_command(model: str, **values: Any) -> None:
    """Chat with a model.

    MODEL is a model folder, a run's folder, a Hub name, a folder with adapters, or "embedded". A model that
    was trained with grpo_fn uses the prompt format of its training, unless options override it. If standard
    input is not a terminal, each line is a message, and only the replies are printed.
    """
    loaded = open_model(model, values)
    values = resolve_prompt(values, loaded.prompt)
    conversation = open_conversation(loaded, values)
    from runners.inference.text_generation import Speed

    if sys.stdin.isatty():
        echo(f"Chatting with {model}. /help shows the commands, Ctrl-D quits.", err=True)
    speed = Speed()
    stopped = False  # by Ctrl-C, in the last reply or at the prompt
    while True:
        try:
            message = _read()
        except KeyboardInterrupt:
            echo("", err=True)
            if stopped:
                break
            stopped = True
            echo("Press Ctrl-C again to quit.", err=True)
            continue
        stopped = False
        if message == "/exit":
            break
        if message == "/help":
            echo_text(_COMMANDS, nl=False, err=True)
        elif message == "/clear":
            conversation.clear()
        elif message:
            with Interrupts() as interrupts:
                show_reply(
                    conversation.reply(message, should_stop=lambda: interrupts.stopped, speed=speed)
                )
            stopped = interrupts.stopped
    echo(speed.line(), err=True)
    if stopped:
        sys.exit(INTERRUPTED)


def open_conversation(model: "InferenceModel", values: dict[str, Any]) -> "Conversation":
    """Starts a conversation with the resolved options."""
    from runners.inference.text_generation import Conversation, generation_key

    return Conversation(
        model,
        sampling_of(values, model),
        key=generation_key(values["seed"]),
        system=values["system"],
        nudge=values["nudge"],
        template_kwargs=values["template_kwargs"],
        raw=values["raw"],
    )


def show_reply(pieces: Iterable[str]) -> None:
    """Streams a reply to standard output, followed by a line break."""
    for piece in pieces:
        echo_output(piece)
    echo()


def _read() -> str:
    """Returns the next message, stripped, or "/exit" at the end of the input."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        # With line editing, and this conversation's messages as history.
        with suppress(ImportError):  # not every Python has it; on macOS it may be editline
            import readline  # noqa: F401 (importing it is what turns editing on in `input`)
        with suppress(EOFError):
            return input(PROMPT_SIGN).strip()
        echo("", err=True)
        return "/exit"
    if sys.stdin.isatty():  # replies may go into a file: nothing else may be written there
        echo_text(PROMPT_SIGN, nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else "/exit"
