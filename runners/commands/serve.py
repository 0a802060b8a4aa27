"""Defines `grpo serve`, which serves a model over HTTP with OpenAI's and vLLM's APIs."""

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from runners.commands.base import command, flag, option, refuse
from runners.commands.options import (
    MODEL,
    PROMPT,
    SAMPLING,
    TRUST,
    open_model,
    resolve_prompt,
    sampling_of,
)
from runners.files.json_files import read_json
from runners.machine.signals import Interrupts
from runners.machine.terminal import echo

LOCAL = ("127.0.0.1", "localhost", "::1")
LENGTH = 4096  # length limit for a model that states none, in tokens


@command(
    "serve",
    click.argument("model"),
    option(
        "--port", "Port; 0 selects a free port.", click.IntRange(0, 65535), 8000, show_default=True
    ),
    option("--host", "Address to listen on.", default="127.0.0.1", show_default=True),
    option(
        "--api-key=KEY", "Key that clients must send; required unless the host is this machine."
    ),
    option("--name", "Name of the model for clients [MODEL]."),
    option(
        "--max-length",
        "Maximum number of tokens in a prompt and its completion.",
        click.IntRange(2),
    ),
    flag(
        "--tinker",
        "Serve Tinker's training API instead, for the packages tinker and tinker-cookbook.",
    ),
    option(
        "--weights=DIR",
        "With --tinker: folder for the models that clients save.",
        click.Path(path_type=Path),
        Path("tinker-weights"),
        show_default=True,
    ),
    PROMPT,
    SAMPLING,
    MODEL,
    TRUST,
    notes="""\
\b
Examples:
  grpo serve outputs/my-first
  OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python agent.py

\b
The sampling and prompt options are defaults for requests that do not set them. After the first
Ctrl-C or SIGTERM, the server finishes the running completions; a second one stops it immediately.
""",
)
def serve_command(
    model: str,
    port: int,
    host: str,
    api_key: str | None,
    name: str | None,
    max_length: int | None,
    tinker: bool,
    weights: Path,
    **values: Any,
) -> None:
    """Serve a model over HTTP for OpenAI clients.

    MODEL is a model folder, a run's folder, a Hub name, a folder with adapters, or "embedded". It answers
    /v1/chat/completions, /v1/completions, /v1/models, /health, and /inference/v1/generate, with token ids and
    log-probs on request.
    """
    extra = "tinker" if tinker else "serve"
    refuse(
        (
            host not in LOCAL and not api_key,
            f"--host {host} requires --api-key KEY, because other machines can reach it",
        ),
        (
            tinker and api_key and not api_key.startswith("tml-"),
            "--api-key: expected a key that starts with tml-, as Tinker's clients require",
        ),
        (
            not all(map(find_spec, ("starlette", "uvicorn", "tinker")[: 2 + tinker])),
            f"grpo serve requires the `{extra}` extra: pip install 'grpo_fn[{extra}]'",
        ),
    )
    loaded = open_model(model, values)
    stated = read_json(loaded.path / "config.json")
    lengths = [stated.get("text_config", stated).get("max_position_embeddings"), max_length]
    length = min(filter(None, [*lengths, loaded.policy.positions]), default=LENGTH)
    if loaded.prompt is None and values["max_tokens"] is None:
        values["max_tokens"] = length
    values = resolve_prompt(values, loaded.prompt)
    import attrs

    from runners.engines.local import LocalEngine
    from runners.serve.app import Server
    from runners.serve.chat import ServedModel
    from runners.serve.service import Service

    served = ServedModel(
        name=name or model,
        tokenizer=loaded.tokenizer,
        decoder=loaded.decoder,
        eos_ids=frozenset(loaded.eos_ids),
        vocabulary=loaded.policy.vocabulary,
        length=length,
        sampling=sampling_of(values, loaded),
        template_kwargs=values["template_kwargs"],
        system=values["system"],
        nudge=values["nudge"],
    )
    engine = loaded.engine
    if isinstance(engine, LocalEngine):
        engine.decoding = attrs.evolve(engine.decoding, few_sizes=True)
    if tinker:
        from runners.serve.tinker.app import TrainingServer
        from runners.serve.tinker.trainer import Trainer

        work = Trainer(loaded.policy, engine, loaded.path, weights)
        server = TrainingServer(work, served, host, port, api_key or "")
    else:
        work = Service(engine, served)
        session = work.open(api_key or "", seed=divmod(values["seed"], 1 << 32), records=False)
        server = Server(work, host, port, None if api_key else session)
    with server, Drain() as drain:
        echo(f"{server.url}  (Ctrl-C finishes the running completions, then stops)")
        work.run(lambda: drain.stopped)
        work.draining = True
        work.run(lambda: work.idle)


class Drain(Interrupts):
    """A context manager in which the first SIGINT or SIGTERM sets `received`, and the second one
    ends the process.
    """

    signals = (signal.SIGINT, signal.SIGTERM)
