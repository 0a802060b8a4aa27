"""`grpo plan`: a run's memory as a table or as JSON, and what a run reports if it does not fit."""

from __future__ import annotations

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
from runners.machine.memory_readings import free_memory, read_memory, usable_memory
from runners.machine.startup import Platform
from runners.machine.terminal import aligned
from runners.memory.forecast import (
    Forecast,
    Phase,
    forecast,
    largest_batch,
    rows_that_fit,
    with_keys,
)
from runners.memory.sizes import ModelSizes, model_sizes
from runners.models.folders import resolve_model
from runners.models.model_reader import load_tokenizer

USUAL_TOKENS = 4096  # of a micro-batch of a model whose sizes are not known


def make_plan(
    config: Config, platform: Platform, *, as_json: bool = False, ranks: int = 1
) -> tuple[str, str | None]:
    """The plan of a checked config for each of `ranks` ranks, and one line if the run does not fit.

    Only the model's shapes are loaded. Raises UserError for a model or data that cannot be used.
    """
    longest, held_out = data_shape(config)
    config = _of_held_out(config, held_out)
    prompt = longest or config.data.max_prompt_length
    source = "the longest prompt of the data" if longest else "data.max_prompt_length"
    sizes = model_sizes(config, platform, ranks)
    total = _within_limit(config, read_memory().total)
    found = forecast(config, platform, total, prompt=prompt, sizes=sizes)
    best = largest_batch(found, platform)
    problem = _too_large(config, total, sizes) or _over_memory(found)
    if as_json:
        facts = {
            "model": config.model.path,
            "ranks": ranks,
            "parameters_trained": sizes.trained,
            "prompt_tokens": prompt,
            "prompt_tokens_from": source,
            "phases": {
                name: {"total": each.total, "parts": attrs.asdict(each)}
                for name, each in found.phases.items()
            },
            "peak": {"phase": found.peak, "bytes": found.nbytes},
            "floor": sizes.floor,
            "memory": found.total,
            "fits": found.fits,
            "largest_batch_size": best,
        }
        return json.dumps(facts, indent=1), problem
    names = [field.name for field in attrs.fields(Phase)]
    rows = [
        [name, *map(gigabytes, (phase.total, *attrs.astuple(phase))), "← peak" * (name == found.peak)]
        for name, phase in found.phases.items()
    ]
    batch = (
        f"optim.batch_size = {best} (now {config.optim.batch_size})" if best else "not even one prompt fits"
    )
    return "\n".join([
        *aligned([["phase", "in all", *names, ""], *rows], right=range(1, 2 + len(names))),
        "",
        f"peak          {gigabytes(found.nbytes)} of {gigabytes(found.total)}{_limit(config, found.total)}",
        f"largest batch {batch}",
        *(["formats       chosen after the first rollout: grpo bench CONFIG shows them"]
          if config.rollout.bits_budget else []),
        *([f"ranks         {ranks}; the figures are for one of them"] if ranks > 1 else []),
        f"assumes       prompts of {prompt} tokens ({source}), completions of full length",
        "time          grpo bench CONFIG measures some steps and says how long the run will take",
    ]), problem  # fmt: skip


def data_shape(config: Config) -> tuple[int, int]:
    """Tokens of the longest training prompt, and how many problems are held out.

    Both are 0 unless data and tokenizer are on this machine. Raises UserError for data or a tokenizer that
    cannot be used.
    """
    named = (config.model.path, config.data.source)
    if not all(path in SHIPPED or Path(path).expanduser().exists() for path in named):
        return 0, 0
    folder = resolve_model(config.model.path, custom_loader=bool(config.model.loader))
    processor = processor_of(config.data, folder, read_json(folder / "config.json"))
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    use_template(tokenizer, config.data.chat_template)
    train, held_out = load_rows(config.data, config.folders)
    examples, _ = build_examples(train, config.data, tokenizer, processor=processor)
    return max(len(example.tokens) for example in examples), len(held_out)


def _of_held_out(config: Config, held_out: int) -> Config:
    """The config with no more problems in an evaluation than there are; 0: their number is not known."""
    samples = min(config.eval.samples or held_out, held_out) if held_out else config.eval.samples
    return with_keys(config, "eval", samples=samples)


def sizes_if_it_can_fit(config: Config, platform: Platform, ranks: int = 1) -> ModelSizes | str:
    """The model's sizes, or a line on why they are unknown.

    Raises UserError if weights, moments and gradients alone exceed the memory.
    """
    try:
        sizes = model_sizes(config, platform, ranks)
    except UserError as error:  # faults of the model itself are reported when it is loaded
        return f"memory: not predicted: {error}"
    if line := _too_large(config, _within_limit(config, read_memory().total), sizes):
        raise UserError(line)
    return sizes


def memory_outlook(
    config: Config, platform: Platform, sizes: ModelSizes | str, prompt: int, held_out: int = 0
) -> tuple[Config, tuple[str, ...]]:
    """The config with micro-batch and rollout.max_batch chosen, and notices.

    `prompt`: tokens of the longest prompt; `held_out`: problems to evaluate on, 0 if not known.
    What the config sets itself stays.
    """
    if isinstance(sizes, str):
        tokens = config.system.micro_batch_tokens or USUAL_TOKENS
        return with_keys(config, "system", micro_batch_tokens=tokens), (sizes,)
    limit = config.system.memory_limit_gb
    bounded = _of_held_out(config, held_out)
    total = _within_limit(config, usable_memory(limit))
    found = forecast(bounded, platform, total, prompt=prompt, sizes=sizes)
    line = _over_memory(found)
    notices, config = [f"memory: {line}"] if line else [], attrs.evolve(found.config, eval=config.eval)
    if not config.rollout.max_batch:
        rows = rows_that_fit(attrs.evolve(found, total=read_memory().active + free_memory(limit)))
        asked = -(-config.optim.batch_size // sizes.ranks) * config.rollout.num_generations
        if rows < asked:
            config = with_keys(config, "rollout", max_batch=rows)
            notices.append(f"decoding: memory holds {rows:,} of {asked:,} rows together")
    return config, tuple(notices)


def _too_large(config: Config, total: int, sizes: ModelSizes) -> str | None:
    """One line if not even weights, moments and gradients fit into the memory; else None."""
    if sizes.floor <= total:
        return None
    advice = 'model.tune = "lora", or ' if config.model.tune == "full" else ""
    return (
        f"{config.where('model.path')}: {config.model.path} needs {gigabytes(sizes.floor)} for weights, "
        f"moments and gradients alone, but there is only {gigabytes(total)}{_limit(config, total)}; take "
        f"{advice}a smaller or a quantized model"
    )


def _over_memory(found: Forecast) -> str | None:
    """One line if the predicted peak exceeds the memory, with the key that lowers it; else None."""
    if found.fits:
        return None
    config = found.config
    keys = {
        "gradient": "system.micro_batch_tokens",
        "update": "model.tune" if config.model.tune == "full" else "model.path",
    }
    return (
        f"the run is expected to take {gigabytes(found.nbytes)} at its peak ({found.peak}), but there is "
        f"only {gigabytes(found.total)}{_limit(config, found.total)}; "
        f"lower {keys.get(found.peak, 'rollout.max_batch')}"
    )


def _within_limit(config: Config, total: int) -> int:
    """`total` bytes, or `system.memory_limit_gb` if that is less."""
    limit = int(config.system.memory_limit_gb * 1e9)
    return min(total, limit) if limit else total


def _limit(config: Config, total: int) -> str:
    limit = config.system.memory_limit_gb * 1e9
    return " (system.memory_limit_gb)" if limit and total == int(limit) else ""
