"""Implements `grpo plan`, which shows a run's memory as a table or as JSON, and a message if the
run does not fit.
"""

import json
from pathlib import Path

import attrs

from runners.config.loading import Config
from runners.config.names import SHIPPED
from runners.data.datasets import load_rows
from runners.data.prompts import build_examples, processor_of
from runners.data.rendering import use_template
from runners.errors import UserError, gigabytes
from runners.files.json_files import read_json
from runners.machine.memory_readings import free_memory, total_memory, usable_memory
from runners.machine.startup import Platform
from runners.machine.terminal import aligned
from runners.memory.forecast import Forecast, Phase, forecast, largest_batch, rows_that_fit
from runners.memory.sizes import ModelSizes, model_sizes
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer

USUAL_TOKENS = 4096  # per micro-batch, for a model with unknown sizes


def make_plan(
    config: Config, platform: Platform, *, as_json: bool = False, ranks: int = 1
) -> tuple[str, str | None]:
    """Returns the memory plan for a checked config on each of `ranks` ranks, and a message if the
    run does not fit.

    Only the model's shapes are loaded. Raises UserError if the model or the data cannot be used.
    """
    longest, held_out = data_shape(config)
    prompt = longest or config.data.max_prompt_length
    source = "the longest prompt of the data" if longest else "data.max_prompt_length"
    sizes = model_sizes(config, platform, ranks)
    total = _all_memory(config)
    found = forecast(config, platform, total, prompt=prompt, sizes=sizes, held_out=held_out)
    best = largest_batch(found)
    phases = found.phases
    peak, nbytes = found.peak
    problem = _too_large(config, sizes) or _over_memory(found)
    if as_json:
        facts = {
            "model": config.model.path,
            "ranks": ranks,
            "parameters_trained": sizes.trained,
            "prompt_tokens": prompt,
            "prompt_tokens_from": source,
            "phases": {
                name: {"total": sum(each), "parts": each._asdict()} for name, each in phases.items()
            },
            "peak": {"phase": peak, "bytes": nbytes},
            "floor": sizes.floor,
            "disk": sizes.written,
            "memory": total,
            "fits": nbytes <= total,
            "largest_batch_size": best,
        }
        return json.dumps(facts, indent=1), problem
    rows = [
        [name, *map(gigabytes, (sum(each), *each)), "← peak" if name == peak else ""]
        for name, each in phases.items()
    ]
    columns = ["phase", "in all", *Phase._fields, ""]
    batch = f"optim.batch_size = {best} (now {config.optim.batch_size})"
    formats = "chosen after the first rollout: see grpo bench CONFIG"
    lines = {
        "peak": f"{gigabytes(nbytes)} of {_spelled(config, total)}",
        "largest batch": batch if best else "not even one prompt fits",
        "disk": f"{gigabytes(sizes.written)} for the final and the best model, besides checkpoints",
        "formats": formats if config.rollout.bits_budget else "",
        "ranks": f"{ranks}; the figures are per rank" if ranks > 1 else "",
        "assumes": f"prompts of {prompt} tokens ({source}), completions of full length",
        "time": "grpo bench CONFIG measures some steps and estimates the run's time",
    }
    table = aligned([columns, *rows], right=range(1, len(columns) - 1))
    named = [f"{name:<14}{text}" for name, text in lines.items() if text]
    return "\n".join([*table, "", *named]), problem


def data_shape(config: Config) -> tuple[int, int]:
    """Returns the longest training prompt's length in tokens, and the number of held-out problems.

    Both are 0 unless data and tokenizer are on this machine. Raises UserError if the data or the
    tokenizer cannot be used.
    """
    for path in (config.model.path, config.data.source):
        if path not in SHIPPED and not Path(path).expanduser().exists():
            return 0, 0
    folder = resolve_model(config.model.path, custom_loader=bool(config.model.loader))
    processor = processor_of(config.data, folder, read_json(folder / "config.json"))
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    use_template(tokenizer, config.data.chat_template)
    train, held_out = load_rows(config.data, config.folders)
    examples, _ = build_examples(train, config.data, tokenizer, processor=processor)
    return max(len(example.tokens) for example in examples), len(held_out)


def sizes_if_it_can_fit(config: Config, platform: Platform, ranks: int = 1) -> ModelSizes | str:
    """Returns the model's sizes, or a message that explains why they are unknown.

    Raises UserError if weights, moments and gradients alone exceed the memory.
    """
    try:
        sizes = model_sizes(config, platform, ranks)
    except UserError as error:  # errors in the model itself are reported when it is loaded
        return f"memory: no prediction: {error}"
    line = _too_large(config, sizes)
    if line:
        raise UserError(line)
    return sizes


def memory_outlook(
    config: Config, platform: Platform, sizes: ModelSizes | str, prompt: int, held_out: int = 0
) -> tuple[Config, tuple[str, ...], dict[str, Phase]]:
    """Chooses the micro-batch size and rollout.max_batch if the config does not set them.

    Returns the config with these values, notices, and the phases of the forecast, which are empty
    if there is no forecast. `prompt` is the longest prompt's length in tokens. `held_out` is the
    number of problems to evaluate on, or 0 if unknown.
    """
    if isinstance(sizes, str):
        tokens = config.system.micro_batch_tokens or USUAL_TOKENS
        return config.having("system", micro_batch_tokens=tokens), (sizes,), {}
    import mlx.core as mx

    limit = config.system.memory_limit_gb
    found = forecast(
        config, platform, usable_memory(limit), prompt=prompt, sizes=sizes, held_out=held_out
    )
    line = _over_memory(found)
    notices = [f"memory: {line}"] if line else []
    config = found.config
    if not config.rollout.max_batch:
        rows = rows_that_fit(attrs.evolve(found, total=mx.get_active_memory() + free_memory(limit)))
        asked = -(-config.optim.batch_size // sizes.ranks) * config.rollout.num_generations
        if rows < asked:
            config = config.having("rollout", max_batch=rows)
            notices.append(f"decoding: memory suffices for {rows:,} of {asked:,} rows at a time")
    return config, tuple(notices), attrs.evolve(found, config=config).phases


def _too_large(config: Config, sizes: ModelSizes) -> str | None:
    """Returns a message if weights, moments and gradients alone exceed the memory,
    otherwise None.
    """
    total = _all_memory(config)
    if sizes.floor <= total:
        return None
    advice = 'model.tune = "lora", or ' if config.model.tune == "full" else ""
    return (
        f"{config.where('model.path')}: {config.model.path} needs {gigabytes(sizes.floor)} for "
        f"weights, moments and gradients alone, but only {_spelled(config, total)} are "
        f"available; use {advice}a smaller or a quantized model"
    )


def _over_memory(found: Forecast) -> str | None:
    """Returns a message if the predicted peak exceeds the memory, which names the key that lowers
    the peak. Otherwise, returns None.
    """
    config = found.config
    phase, nbytes = found.peak
    if nbytes <= found.total:
        return None
    keys = {
        "gradient": "system.micro_batch_tokens",
        "update": "model.tune" if config.model.tune == "full" else "model.path",
    }
    return (
        f"the run is expected to need {gigabytes(nbytes)} at its peak ({phase}), but only "
        f"{_spelled(config, found.total)} are available; lower "
        f"{keys.get(phase, 'rollout.max_batch')}"
    )


def _all_memory(config: Config) -> int:
    """Returns the machine's or its GPU's memory in bytes, or `system.memory_limit_gb` if that is
    less.
    """
    total = total_memory()
    return min(total, int(config.system.memory_limit_gb * 1e9) or total)


def _spelled(config: Config, total: int) -> str:
    is_set = total == int(config.system.memory_limit_gb * 1e9)
    return gigabytes(total) + (" (system.memory_limit_gb)" if is_set else "")
