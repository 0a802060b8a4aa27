"""Measures a model on a set of problems, for `grpo eval`: exact match, pass@k, rewards, lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import EVALUATION, fold_in
from runners.checkpoints.manifest import digest
from runners.config.loading import Config, load_config
from runners.config.recorded import run_of
from runners.data.prompts import Example, build_examples
from runners.data.rendering import use_template
from runners.engines.settings import sampling_of
from runners.environments.environments import Environments, build_environments
from runners.errors import UserError
from runners.evaluation.comparison import Metric, ModelResult, pass_at_k
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.evaluation import held_out
from runners.files.cache_folder import remembers
from runners.files.run_files import OWN_RUNS
from runners.inference.inference_model import InferenceModel, load_inference
from runners.machine.startup import Platform
from runners.rewards.scoring import Reward, Scorer
from runners.user_code.worker import Worker

Problems = Sequence[Mapping[str, Any]]
_SAMPLED = ("stop", "max_new_tokens", "temperature", "top_p", "top_k", "min_p")  # of [rollout]
_TRAINED = {  # keys of the other sections that change no evaluation
    *(
        "max_samples",
        "curriculum",
        "difficulty",
        "pass_rates",
        "target_rate",
        "rate_decay",
        "explore",
    ),
    *(
        "pass_reward",
        "aggregate",
        "timeout",
        "workers",
        "schedule",
        "stop_if_all_fail",
        "every",
        "at_start",
    ),
}


def config_of_runs(
    models: Sequence[str], overrides: Sequence[str], note: Callable[[str], None], *, has_data: bool
) -> Config | None:
    """The config of the models' run, with `section.key=value` overrides;
    None if no model is from a run.

    It may name code, so it has to be one that this user has trained with here. With another one the
    result is None if there is other data. `note` gets a line that names the file.

    Raises UserError for another one without data, and if two models' runs are not measured in the
    same way.
    """
    files = list(dict.fromkeys(file for model in models if (file := run_of(model))))
    if others := [file for file in files if not remembers(OWN_RUNS, digest(file))]:
        if has_data:
            return None
        raise UserError(
            f"{others[0]}: is of no run of yours on this machine, and may name code; --config {others[0]} "
            "measures with its data and rewards, --data with other data"
        )
    if not files:
        return None
    found = [load_config(str(file), overrides) for file in files]
    one, other = _measured(found[0]), _measured(found[-1])
    if differ := [name for name in one if one[name] != other.get(name)]:
        places = f"{files[0]} and {files[-1]} differ in {', '.join(differ)}"
        raise UserError(f"the runs {places}; --config says what both are measured by")
    note(
        f"data, prompts and rewards as in the run ({files[0]}); --config, --data and --set replace them"
    )
    return found[0]


def _measured(config: Config) -> dict[str, Any]:
    """The keys that decide what an evaluation measures, with their values."""
    keys = config.to_dict()
    keys["rollout"] = {name: keys["rollout"].get(name) for name in _SAMPLED}
    sections = ("data", "answer", "rollout", "reward", "env", "eval")
    return {
        f"{s}.{name}": value
        for s in sections
        for name, value in keys[s].items()
        if name not in _TRAINED
    }


def open_model(
    config: Config, name: str, machine: Platform, worker: Worker, **options: Any
) -> tuple[InferenceModel, Environments | None]:
    """A model, read as a config says, with further `options` of the loader;
    and the config's environments."""
    loaded = load_inference(
        name,
        machine,
        loader=config.model.loader,
        folders=config.folders,
        images=bool(config.data.image),
        image_max_pixels=config.data.image_max_pixels,
        **options,
    )
    use_template(loaded.tokenizer, config.data.chat_template)
    tokenizer, decoder, ends = loaded.tokenizer, loaded.decoder, loaded.eos_ids
    return loaded, build_environments(
        config.env, config.data, tokenizer, decoder, ends, config.folders, worker
    )


def evaluator_of(
    model: InferenceModel,
    config: Config,
    rewards: Sequence[Reward],
    environments: Environments | None,
    rows: int = 0,
) -> tuple[Evaluator, g.Sampling]:
    """What completes and scores a config's problems by a model, and sampling as in [rollout]:
    one of each."""
    reward, thoughts = config.reward, config.data.thoughts
    evaluator = Evaluator(
        engine=model.engine,
        scorer=Scorer(rewards, reward.timeout, reward.on_error, thoughts) if rewards else None,
        form=config.answer_form,
        decoder=model.decoder,
        nudge=config.data.nudge,
        rows=rows or config.rollout.max_batch,
        environments=environments,
        vision=model.vision,
    )
    sampling = sampling_of(config, model.eos_ids)
    return evaluator, attrs.evolve(sampling, num_generations=1, with_entropy=False)


def choose_problems(
    rows: Problems, model: InferenceModel, config: Config, tools: Sequence[dict[str, Any]] = ()
) -> tuple[dict[int, Example], int]:
    """The problems by their rows' numbers, the same `eval.samples` as in training; and how many
    prompts are longer than `data.max_prompt_length`. `tools`: schemas that the prompts show."""
    processor = model.vision.processor if model.vision else None
    examples, too_long = build_examples(rows, config.data, model.tokenizer, tools, processor)
    most = config.eval.max_new_tokens or config.rollout.max_new_tokens
    model.check([example.tokens for example in examples], most)
    return {each.number: each for each in held_out(examples, config.eval.samples)}, too_long


def measure(
    model: InferenceModel,
    name: str,
    chosen: Mapping[int, Example],
    config: Config,
    rewards: Sequence[Reward],
    *,
    num: int = 0,
    ks: Sequence[int] = (),
    rows: int = 0,
    environments: Environments | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> ModelResult:
    """Completes the problems of `choose_problems` greedily,
    and `num` times each by sampling as in [rollout].

    With environments each completion is a conversation, which succeeds if the environment's own
    reward is at least 1; without one, if the last turn has the gold answer. pass@k for each of `ks`
    is of right answers, with answer.form = "none" of successes. `rows` completions are sampled at a
    time (0: the config's). `note` gets a line when all completions of a kind are done.
    """
    evaluator, sampling = evaluator_of(model, config, rewards, environments, rows)
    sampling = attrs.evolve(
        sampling, max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens
    )
    numbered, examples, json_rows = (
        list(chosen.items()),
        list(chosen.values()),
        list[dict[str, Any]](),
    )

    def completed(kind: str, sampling: g.Sampling) -> list[Completion]:
        batches = evaluator.complete(examples, sampling, evaluation_key(config))
        found = [one for part, _ in batches for one in part]
        for place, one in enumerate(found):
            problem, sample = divmod(place, sampling.num_generations)
            json_rows.append(_row(name, kind, *numbered[problem], sample, one))
        note(f"{name}: {kind} completions of {len(examples)} problems are done")
        return found

    greedy = completed("greedy", attrs.evolve(sampling, temperature=0))
    details = _metrics(greedy, 1, "")
    metrics = {
        head: details.pop(head) for head in ("success", "exact match", "reward") if head in details
    }
    if num:
        sampled = completed("sample", attrs.evolve(sampling, num_generations=num))
        good = [each.success if each.right is None else each.right for each in sampled]
        if None not in good:
            counts = [sum(map(bool, good[n : n + num])) for n in range(0, len(good), num)]
            for k in ks:
                values = np.array([pass_at_k(num, count, k) for count in counts])
                metrics[f"pass@{k}"] = Metric(values, percent=True)
        details |= _metrics(sampled, num, "sampled ")
        details.pop("sampled exact match", None)
    notice = evaluator.notice(greedy, examples, sampling.max_new_tokens)
    faults = (*evaluator.problems, *filter(None, [notice]))
    return ModelResult(name, tuple(chosen), metrics | details, tuple(json_rows), faults)


def evaluation_key(config: Config) -> mx.array:
    """The key of all completions: of the run's seed, but shared with no other purpose."""
    return fold_in(mx.random.key(config.run.seed), EVALUATION)


def _row(
    name: str, kind: str, number: int, example: Example, sample: int, one: Completion
) -> dict[str, Any]:
    """A completion as a JSON row."""
    judged = {"extracted": one.answer, "correct": one.right}
    played = {
        key: getattr(one, key) for key in ("messages", "success", "turns", "calls", "failures")
    }
    return {
        "model": name,
        "kind": kind,
        "problem": number,
        "sample": sample,
        "prompt": example.text,
        **({"images": [image.name for image in example.images]} if example.images else {}),
        **({"answer": example.answer} if example.answer else {}),
        "completion": one.text,
        **(judged if one.right is not None else {}),
        "tokens": one.tokens,
        "finish": one.finish,
        "reward": one.reward,
        "rewards": one.rewards,
        **(
            {key: value for key, value in played.items() if value is not None}
            if one.messages
            else {}
        ),
        **({"fault": one.fault} if one.fault else {}),
    }


def _metrics(rows: Sequence[Completion], num: int, prefix: str) -> dict[str, Metric]:
    """A number for each problem: the means over its `num` completions, in their order."""
    fields = {"success": "success", "exact match": "right", "reward": "reward"}
    later = {
        "turns": "turns",
        "calls": "calls",
        "failed calls": "failures",
        "tool seconds": "seconds",
    }
    lengths = {"length": "tokens", "truncated": "cut"}
    columns = {name: [getattr(row, field) for row in rows] for name, field in fields.items()}
    columns = {
        name: column for name, column in columns.items() if any(x is not None for x in column)
    }
    columns |= {f"reward/{name}": [row.rewards[name] for row in rows] for name in rows[0].rewards}
    for name, field in ({**later, **lengths} if rows[0].turns else lengths).items():
        columns[name] = [getattr(row, field) for row in rows]
    metrics = {}
    for name, column in columns.items():
        values = np.array(column, np.float64).reshape(-1, num)
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):  # NaN for a row without values
            means = np.where(known, values, 0.0).sum(axis=1) / known.sum(axis=1)
        metrics[prefix + name] = Metric(
            means, percent=name in ("success", "exact match", "truncated")
        )
    return metrics
