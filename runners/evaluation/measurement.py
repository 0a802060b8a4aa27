"""Measures a model on a set of problems, for `grpo eval`: exact match, pass@k, rewards, lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import EVALUATION, fold_in
from runners.agents.agents import build_player
from runners.checkpoints.manifest import digest
from runners.config.loading import Config, load_config, run_of
from runners.data.prompts import Example, build_examples
from runners.data.rendering import use_template
from runners.data.row_files import Rows
from runners.engines.settings import sampling_of
from runners.environments.environments import Player
from runners.errors import UserError
from runners.evaluation.comparison import Metric, ModelResult, pass_at_k
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.evaluation import held_out
from runners.files.own_folder import remembers
from runners.files.run_files import OWN_RUNS
from runners.inference.inference_model import InferenceModel, load_inference
from runners.machine.startup import Platform
from runners.rewards.scoring import Reward, Scorer
from runners.user_code.worker import Worker

_SHARES = ("success", "exact match", "truncated")  # metrics that are percentages
_SAMPLED = (
    "stop",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
)  # keys of [rollout] that are compared
_TRAINED = {  # keys of other sections that do not affect evaluations
    *("max_samples", "curriculum", "difficulty", "pass_rates", "target_rate", "rate_decay"),
    *("explore", "pass_reward", "aggregate", "timeout", "workers", "schedule", "stop_if_all_fail"),
    *("every", "at_start"),
}


def config_of_runs(
    models: Sequence[str], overrides: Sequence[str], note: Callable[[str], None], *, has_data: bool
) -> Config | None:
    """Returns the config of the run that trained the models, with `section.key=value` overrides.
    Returns None if no model comes from a run.

    A config may name code, so a config is only used if this user has trained with it on this
    machine. For any other config, the result is None if data is given separately. `note` is called
    with a message that names the file.

    Raises UserError for such a config if no data is given, and if the two models' runs require
    different measurements.
    """
    files = list(dict.fromkeys(filter(None, map(run_of, models))))
    others = [file for file in files if not remembers(OWN_RUNS, digest(file))]
    if others:
        if has_data:
            return None
        raise UserError(
            f"{others[0]}: not the config of one of your runs on this machine, and it may name "
            f"code; --config {others[0]} uses its data and rewards, --data uses different data"
        )
    if not files:
        return None
    configs = [load_config(str(file), overrides) for file in files]
    one = _measured(configs[0])
    other = _measured(configs[-1])
    differ = [name for name in one if one[name] != other.get(name)]
    if differ:
        raise UserError(
            f"the runs {files[0]} and {files[-1]} differ in {', '.join(differ)}; --config sets one "
            "config for both"
        )
    note(
        f"data, prompts and rewards as in the run ({files[0]}); "
        "--config, --data and --set replace them"
    )
    return configs[0]


def _measured(config: Config) -> dict[str, Any]:
    """Returns the keys that determine what an evaluation measures, with their values."""
    keys = config.to_dict()
    keys["rollout"] = {name: keys["rollout"].get(name) for name in _SAMPLED}
    measured = {}
    for section in ("data", "answer", "rollout", "reward", "env", "eval"):
        for name, value in keys[section].items():
            if name not in _TRAINED:
                measured[f"{section}.{name}"] = value
    return measured


def open_model(
    config: Config,
    name: str,
    machine: Platform,
    worker: Worker,
    *,
    trust_remote_code: bool,
    adapter: str = "",
    dtype: str = "auto",
) -> tuple[InferenceModel, Player | None]:
    """Loads the model as configured, and creates the config's environments.

    `adapter` and `dtype` are arguments of `load_inference`.
    """
    loaded = load_inference(
        name,
        machine,
        adapter=adapter,
        dtype=dtype,
        loader=config.model.loader,
        folders=config.folders,
        trust_remote_code=trust_remote_code,
        images=bool(config.data.image),
        image_max_pixels=config.data.image_max_pixels,
    )
    use_template(loaded.tokenizer, config.data.chat_template)
    environments = build_player(config, loaded.tokenizer, loaded.decoder, loaded.eos_ids, worker)
    return loaded, environments


def evaluator_of(
    model: InferenceModel,
    config: Config,
    rewards: Sequence[Reward],
    environments: Player | None,
    rows: int = 0,
) -> tuple[Evaluator, g.Sampling]:
    """Returns the evaluator that completes and scores a config's problems with a model, and the
    sampling settings from [rollout].
    """
    scorer = None
    if rewards:
        reward = config.reward
        scorer = Scorer(rewards, reward.timeout, reward.on_error, config.data.thoughts)
    evaluator = Evaluator(
        engine=model.engine,
        scorer=scorer,
        form=config.answer_form,
        decoder=model.decoder,
        nudge=config.data.nudge,
        rows=rows or config.rollout.max_batch,
        environments=environments,
        vision=model.vision,
    )
    return evaluator, attrs.evolve(
        sampling_of(config, model.eos_ids), num_generations=1, with_entropy=False
    )


def choose_problems(
    rows: Rows, model: InferenceModel, config: Config, tools: Sequence[dict[str, Any]] = ()
) -> tuple[dict[int, Example], int]:
    """Returns the problems, keyed by row number, and the number of prompts that are longer than
    `data.max_prompt_length`. The problems are the same `eval.samples` as in training. `tools` are
    schemas that the prompts show.
    """
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
    environments: Player | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> ModelResult:
    """Completes each problem of `choose_problems` once greedily and `num` times by sampling as in
    [rollout].

    With environments, each completion is a conversation. The conversation succeeds if the
    environment's own reward is at least 1 or, without such a reward, if the last turn contains the
    reference answer. pass@k for each of `ks` counts right answers; with answer.form = "none", it
    counts successes. `rows` completions are sampled at a time; 0 means the config's number. `note`
    is called with a message after all completions of one kind.
    """
    evaluator, one_each = evaluator_of(model, config, rewards, environments, rows)
    most = config.eval.max_new_tokens or config.rollout.max_new_tokens
    sampling = attrs.evolve(one_each, max_new_tokens=most)
    numbered = list(chosen.items())
    examples = list(chosen.values())
    json_rows: list[dict[str, Any]] = []

    def completed(kind: str, sampling: g.Sampling) -> list[Completion]:
        found = evaluator.complete_all(examples, sampling, evaluation_key(config))
        for place, one in enumerate(found):
            problem, sample = divmod(place, sampling.num_generations)
            number, example = numbered[problem]
            json_rows.append(_row(name, kind, number, example, sample, one))
        note(f"{name}: {kind} completions of {len(examples)} problems finished")
        return found

    greedy = completed("greedy", attrs.evolve(sampling, temperature=0))
    details = _metrics(greedy, 1, "")
    first = [head for head in ("success", "exact match", "reward") if head in details]
    metrics = {head: details.pop(head) for head in first}
    if num:
        sampled = completed("sample", attrs.evolve(sampling, num_generations=num))
        good = [each.success if each.right is None else each.right for each in sampled]
        if None not in good:
            counts = [sum(map(bool, good[n : n + num])) for n in range(0, len(good), num)]
            for k in ks:
                rates = np.array([pass_at_k(num, count, k) for count in counts])
                metrics[f"pass@{k}"] = Metric(rates, percent=True)
        details |= _metrics(sampled, num, "sampled ")
        details.pop("sampled exact match", None)
    notices = filter(None, [evaluator.notice(greedy, examples, sampling.max_new_tokens)])
    faults = (*evaluator.problems, *notices)
    return ModelResult(name, tuple(chosen), metrics | details, tuple(json_rows), faults)


def evaluation_key(config: Config) -> mx.array:
    """Returns the random key for all completions, which is derived from the run's seed but not used
    for anything else.
    """
    return fold_in(mx.random.key(config.run.seed), EVALUATION)


def _row(
    name: str, kind: str, number: int, example: Example, sample: int, one: Completion
) -> dict[str, Any]:
    """Returns a completion as a JSON row."""
    row = {
        "model": name,
        "kind": kind,
        "problem": number,
        "sample": sample,
        "prompt": example.text,
        "images": [image.name for image in example.images],
        "answer": example.answer,
        "completion": one.text,
        "extracted": one.answer,
        "correct": one.right,
        "tokens": one.tokens,
        "finish": one.finish,
        "reward": one.reward,
        "rewards": one.rewards,
        "messages": one.messages,
        "success": one.success,
        "turns": one.turns,
        "calls": one.calls,
        "failures": one.failures,
        "fault": one.fault,
    }
    unjudged = {"extracted", "correct"} if one.right is None else set()
    single = set() if one.messages else {"messages", "success", "turns", "calls", "failures"}
    unknown = {
        each for each in ("images", "answer", "success", "fault") if row[each] in ([], "", None)
    }
    omitted = unjudged | single | unknown
    return {key: value for key, value in row.items() if key not in omitted}


def _metrics(rows: Sequence[Completion], num: int, prefix: str) -> dict[str, Metric]:
    """Returns each metric's mean over the `num` completions for a problem, in problem order."""
    judged = {
        "success": [row.success for row in rows],
        "exact match": [row.right for row in rows],
        "reward": [row.reward for row in rows],
    }
    columns: dict[str, list[Any]] = {
        name: column for name, column in judged.items() if set(column) != {None}
    }
    columns |= {f"reward/{name}": [row.rewards[name] for row in rows] for name in rows[0].rewards}
    if rows[0].turns:
        columns |= {
            "turns": [row.turns for row in rows],
            "calls": [row.calls for row in rows],
            "failed calls": [row.failures for row in rows],
            "tool seconds": [row.seconds for row in rows],
        }
    columns |= {"length": [row.tokens for row in rows], "truncated": [row.cut for row in rows]}
    metrics = {}
    for name, column in columns.items():
        values = np.array(column, np.float64).reshape(-1, num)
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN for a row without values
            means = np.where(known, values, 0.0).sum(axis=1) / known.sum(axis=1)
        metrics[prefix + name] = Metric(means, percent=name in _SHARES)
    return metrics
