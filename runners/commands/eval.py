"""Defines `grpo eval`, which measures a model on a set of problems or compares two models."""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runners.commands.base import command, option, refuse
from runners.commands.options import SET, TRUST, echo_all
from runners.errors import UserError
from runners.files.json_files import json_line, write_json
from runners.machine.terminal import echo, echo_text

if TYPE_CHECKING:
    from runners.config.loading import Config
    from runners.evaluation.comparison import ModelResult


@command(
    "eval",
    click.argument("model"),
    click.argument("other", required=False),
    option(
        "--config=CONFIG", "Use the data, prompts and rewards of this training config.", default=""
    ),
    option("--data=SOURCE", "Use all problems of this file, folder or Hub data set.", default=""),
    option("--split=NAME", "Split of the data [data.eval_split of the config].", default=""),
    option("--samples", "Number of problems [200]; 0: all.", click.IntRange(0)),
    option("--num", "Samples per problem [the largest k].", click.IntRange(0)),
    option("--k as ks=K[,K…]", "Values of k for pass@k, such as 1,8.", default=""),
    option(
        "--max-tokens",
        "Maximum length of a completion, in tokens [the config's].",
        click.IntRange(1),
    ),
    option("--batch", "Number of completions decoded together [256].", click.IntRange(1)),
    option("--out=FILE", "Write every completion as a JSON line.", default=""),
    option("--json as json_file=FILE", "Write the table's numbers as JSON.", default=""),
    SET,
    TRUST,
    notes="""\
\b
Examples:
  grpo eval outputs/my-first/final --k 1,8
  grpo eval Qwen/Qwen2.5-0.5B-Instruct outputs/my-first/final --config train.toml --num 16 --k 1,4,16
  grpo eval MODEL --data openai/gsm8k --samples 0 --out completions.jsonl --json scores.json
  grpo eval MODEL outputs/my-tools/final --config tools.toml

\b
Brackets in the table contain 95 % intervals: Wilson intervals for shares of problems, otherwise
bootstrap intervals from 2,000 resamplings of the problems. Two models are compared problem by
problem.
""",
)
def eval_command(model: str, other: str | None, out: str, json_file: str, **values: Any) -> None:
    """Evaluate a model, or compare two models.

    MODEL and OTHER are model folders, runs' folders, Hub names, folders with adapters, or "embedded". Data,
    prompts, stop strings and rewards come from --config, otherwise from the run that produced a model,
    otherwise from the defaults.
    """
    models = [model, other] if other else [model]
    ks = _ks(values["ks"])
    most = max(ks, default=0)
    num = most if values["num"] is None else values["num"]
    refuse(
        (
            most > num,
            f"--k {most}: expected at least {most} samples per problem, found --num {num}",
        )
    )
    for name in filter(None, (out, json_file)):
        folder = Path(name).expanduser().resolve().parent
        refuse(
            (not folder.is_dir(), f"{name}: no such folder: {Path(name).parent}"),
            (
                not os.access(folder, os.W_OK),
                f"{name}: cannot be written: {Path(name).parent} is read-only",
            ),
        )
    from runners.machine import startup

    echo_all(startup.prepare().notices)
    config = _config(models, values)
    machine = startup.prepare(config.system.memory_limit_gb)
    measured = _measure_all(models, config, ks or ((1,) if num else ()), num, machine, values)
    from runners.evaluation.comparison import comparison_summary, comparison_table

    if out:
        rows = chain.from_iterable(each.completions for each in measured)
        lines = [f"{json_line(row)}\n" for row in rows]
        Path(out).expanduser().write_text("".join(lines), encoding="utf-8")
    if json_file:
        write_json(Path(json_file).expanduser(), comparison_summary(measured), allow_nan=False)
    echo_text(comparison_table(measured))


def _ks(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"([1-9]\d{0,8}(, *[1-9]\d{0,8})*)?", text):
        raise UserError(f"--k {text}: expected positive integers, such as 1,8")
    return tuple(sorted({int(part) for part in text.split(",") if part}))


def _config(models: Sequence[str], values: dict[str, Any]) -> "Config":
    """Returns the config to measure with: from --config, from a model's run, from a model's grpo_prompt.json,
    or from the preset of a shipped model.

    Raises UserError if the two models were trained with different prompt formats.
    """
    from runners.config.loading import load_config
    from runners.config.names import SHIPPED_PRESETS
    from runners.evaluation.measurement import config_of_runs
    from runners.inference.inference_model import find_model, prompt_settings_of

    overrides = _overrides(values)
    note = partial(echo, err=True)
    if values["config"]:
        return load_config(values["config"], overrides)
    # The Hub configuration that a run names belongs to the run's own source.
    other = ['data.name=""'] if values["data"] else []
    found = config_of_runs(models, [*other, *overrides], note, has_data=bool(values["data"]))
    if found:
        return found
    preset = SHIPPED_PRESETS.get(models[0]) if len({*models}) == 1 else None
    if preset:
        note(
            f"data, prompts and rewards as in the preset {preset}; --config, --data and --set "
            "replace them"
        )
    config = load_config(preset, overrides)
    asked = {}
    for name in models:
        path, adapters = find_model(name, custom_loader=bool(config.model.loader))
        asked[name] = prompt_settings_of(path, adapters)
    asked = {name: prompt for name, prompt in asked.items() if prompt}
    if len(set(asked.values())) > 1:
        raise UserError(
            f"{' and '.join(asked)} were trained with different prompt formats "
            "(grpo_prompt.json); --config sets one for both"
        )
    for name, prompt in list(asked.items())[:1]:
        file = f"{name}: grpo_prompt.json"
        note(f"prompt format as in training ({file}); --config and --set replace it")
        config = load_config(None, overrides, recorded=prompt.sections(), label=file)
    return config


def _overrides(values: dict[str, Any]) -> list[str]:
    """Returns the command line's values as --set overrides. Later overrides take precedence."""
    given = {
        "model.path": "embedded",  # not used: the command line names the models
        "data.source": values["data"] or None,
        "data.eval_split": values["split"] or None,
        "eval.samples": values["samples"],
        "eval.max_new_tokens": values["max_tokens"],
    }
    written = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    return [*written, *values["overrides"]]


def _measure_all(
    models: Sequence[str],
    config: "Config",
    ks: tuple[int, ...],
    num: int,
    machine: Any,
    values: dict[str, Any],
) -> "list[ModelResult]":
    """Measures the models one after the other, so that only one is in memory."""
    from runners.data.datasets import load_rows, load_split, with_answers_of
    from runners.data.prompts import reward_columns
    from runners.environments.environments import all_rewards, load_code, start_worker
    from runners.evaluation.measurement import choose_problems, measure, open_model
    from runners.rewards.scoring import check_columns

    worker = start_worker(config)
    rewards = load_code(config, worker)
    rows = (
        load_split(config.data, config.data.eval_split, folders=config.folders)
        if values["data"]
        else load_rows(config.data, config.folders)[1]  # rows that training holds out
    )
    config = with_answers_of(config, rows)
    columns = reward_columns(rows, config.data.answer)
    check_columns(rewards, columns, environments=config.env.answers)
    measured: list[ModelResult] = []
    for name in models:
        loaded, environments = open_model(
            config, name, machine, worker, trust_remote_code=values["trust_remote_code"]
        )
        echo_all(loaded.notices)
        if environments is not None:
            environments.check_columns(columns)
        tools = environments.schemas if environments else ()
        chosen, too_long = choose_problems(rows, loaded, config, tools)
        echo_all(rows.notices(f"{name}, eval", too_long, config.data.max_prompt_length))
        result = measure(
            loaded,
            name,
            chosen,
            config,
            all_rewards(rewards, environments) if rewards or environments else (),
            num=num,
            ks=ks,
            rows=values["batch"] or 0,
            environments=environments,
            note=partial(echo, err=True),
        )
        measured.append(result)
        echo_all(result.problems)
        del loaded
    return measured
