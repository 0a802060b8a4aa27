"""Checks more than single keys: files must exist, and keys must be consistent. Nothing is
loaded.
"""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from runners.answers.forms import FORMS, NONE, answer_form
from runners.config.conditions import condition_fault
from runners.config.names import (
    EMBEDDED,
    EXAMPLE_REWARD,
    HUB_NAME,
    REWARD_NAMES,
    SELF,
    SHIPPED,
    TASK_SCORE,
    TASKS,
    TASKSETS,
    other_name,
)
from runners.config.reading import Settings
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import ConfigError, did_you_mean, show
from runners.files.run_files import COMPLETIONS

EXPECTED_MODEL = f'"{EMBEDDED}", a model folder or a name on the Hugging Face Hub'
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_GSM8K = "openai/gsm8k"
_BUDGETED = ("affine-3", "affine-4", "affine-6")

# A key and its value ("" means any) → keys that must then be empty.
_EXCLUDED_BY = {
    ("data.image", ""): (
        *("model.loader", "env.factory", "env.tools", "env.program", "env.taskset"),
        *("loss.router_aux_coef", "loss.router_replay"),
    ),
    ("data.prompt_form", "raw"): (
        *("data.system_prompt", "data.chat_template", "data.chat_template_kwargs", "data.image"),
        *("env.factory", "env.tools", "env.program", "env.taskset"),
    ),
    ("teacher.path", ""): ("data.image", "rollout.first_stage"),
    ("teacher.hint", ""): ("env.factory", "env.tools", "env.program", "env.taskset"),
    ("env.program", ""): ("env.factory", "env.tools", "env.taskset"),
    ("env.taskset", ""): ("env.factory", "env.tools"),
}

# A key and its value ("" means any) → keys that have no effect without it.
_ONLY_IF = {
    ("data.image", ""): ("data.image_max_pixels", "data.image_folder"),
    ("data.curriculum", "static"): ("data.pass_rates",),
    ("data.curriculum", "adaptive"): ("data.target_rate", "data.rate_decay", "data.explore"),
    ("teacher.path", ""): ("teacher.form", "teacher.weight", "teacher.task_weight", "teacher.hint"),
    ("sft.completions", ""): ("sft.min_reward",),
}


def resolved_sections(built: Mapping[str, Any], found: Settings) -> dict[str, Any]:
    """Returns the sections with resolved paths. A section that is None had errors and is skipped.

    Errors are added to `found.problems`, one line each.
    """
    result = dict(built)
    paths = _Paths(found)
    for key, resolved in _RESOLVED.items():
        section, name = key.split(".")
        if built[section] is not None:
            value = resolved(paths, getattr(built[section], name), key)
            result[section] = attrs.evolve(result[section], **{name: value})
    task = [result[name] for name in ("answer", "data", "reward", "env")]
    return result | (paths.task(*task) if None not in task else {})


@attrs.frozen
class _Paths:
    """Resolves the paths and functions that keys name. A missing path or function is an error."""

    found: Settings

    def task(self, answer: Any, data: Any, reward: Any, env: Any) -> dict[str, Any]:
        """Returns the sections answer, data and reward. If the config sets no system prompt, nudge
        or reward, the answer format determines these values.

        The format's prompt is added only to questions in a chat, because other texts and messages
        are complete prompts.
        """
        is_set = self.found.is_set
        functions = reward.functions
        chosen = is_set("reward.functions")
        if env.taskset and not is_set("data.source"):
            data = attrs.evolve(data, source=env.taskset, eval_split=data.split)
        if is_set("data.answer") and data.answer and self.is_example(functions):
            functions = REWARD_NAMES
            chosen = False
            self.found.notices.append(
                f"{self.found.label}: data.answer replaces the example reward"
            )
        if not is_set("answer.form"):
            own = functions and not {*functions} & {*REWARD_NAMES, TASK_SCORE}
            if own or env.agents or not data.answer:
                answer = attrs.evolve(answer, form=NONE)
        elif ":" in answer.form and answer.form.partition(":")[0] not in FORMS:
            answer = attrs.evolve(answer, form=self.function(answer.form, "answer.form"))
        try:
            form = answer_form(answer.form)
        except ValueError as error:
            self.found.fault("answer.form", f"expected {error}")
            return {}
        if form is not None and not data.answer:
            self.found.fault(
                "answer.form", f'expected "{NONE}" with data.answer = "", found {show(answer.form)}'
            )
        if not chosen and data.source.startswith(TASKS):
            functions = (TASK_SCORE,)
        elif not chosen and (env.agents or answer.form != "xml"):
            functions = () if env.agents or form is None else REWARD_NAMES[:1]
        if not data.name and data.source == _GSM8K and not os.path.exists(_GSM8K):
            # The Hub has two configurations of GSM8K and no default.
            data = attrs.evolve(data, name="main")
        asks = None if data.prompt or data.prompt_form == "raw" else form
        if not is_set("data.system_prompt"):
            data = attrs.evolve(data, system_prompt=asks.instruction if asks else "")
        if not is_set("data.nudge"):
            data = attrs.evolve(data, nudge=asks.nudge if asks else "")
        return {
            "answer": answer,
            "data": data,
            "reward": attrs.evolve(reward, functions=functions),
        }

    def model(self, name: str, key: str) -> str:
        return name if name == SELF else self.source(name, key, EXPECTED_MODEL, (".safetensors",))

    def data(self, name: str, key: str) -> str:
        if name.startswith((TASKS, TASKSETS)):
            return name
        expected = (
            f'"{EMBEDDED}", a file or folder ({", ".join(_DATA_SUFFIXES)}) or a name on the Hub'
        )
        return self.source(name, key, expected, _DATA_SUFFIXES)

    def completions(self, name: str, key: str) -> str:
        """Returns the path of a completions file. For a run's folder, the path is that of its
        completions.jsonl.
        """
        place = self.existing(name) or ""
        return self.file(os.path.join(place, COMPLETIONS) if os.path.isdir(place) else name, key)

    def tools(self, names: tuple[str, ...], key: str) -> tuple[str, ...]:
        expected = f"{FUNCTION_FORMS}, or a file whose functions are tools"
        return tuple(
            self.file(name, key) if name.endswith(".py") else self.function(name, key, expected)
            for name in names
        )

    def program(self, command: tuple[str, ...], key: str) -> tuple[str, ...]:
        """Returns a command with resolved file paths."""
        files = {word: self.existing(word) for word in command[1:] if "." in word}
        return tuple(files.get(word) or word for word in command)

    def rewards(self, names: tuple[str, ...], key: str) -> tuple[str, ...]:
        def one(name: str) -> str:
            hint = did_you_mean(name, REWARD_NAMES) or f"; built in are {', '.join(REWARD_NAMES)}"
            return self.function(
                name, key, f"a built-in reward, {FUNCTION_FORMS}", "" if ":" in name else hint
            )

        return tuple(name if name in REWARD_NAMES else one(name) for name in names)

    def function(self, name: str, key: str, expected: str = FUNCTION_FORMS, hint: str = "") -> str:
        """Returns the name of a custom function in a config, with the resolved path if it names a
        Python file. Returns an empty text if there is none.
        """
        module, _, function = name.rpartition(":")
        is_file = module.endswith(".py")
        if not name:
            return name
        if not function.isidentifier() or not (
            is_file or all(map(str.isidentifier, module.split(".")))
        ):
            self.found.fault(key, f"expected {expected}, found {show(name)}{hint}")
            return name
        return f"{self.file(module, key)}:{function}" if is_file else name

    def is_example(self, functions: tuple[str, ...]) -> bool:
        """Returns whether the only reward is the unchanged example that `grpo init` wrote."""
        file, _, name = "".join(functions).rpartition(":")
        if name != "reward" or not os.path.isfile(file):
            return False
        return Path(file).read_bytes().endswith(EXAMPLE_REWARD.encode())

    def file(self, name: str, key: str, kind: str = "file") -> str:
        """Returns the path of a file or folder that must exist, or an empty text if `name` is
        empty.
        """
        path = self.existing(name)
        exists = os.path.isdir if kind == "folder" else os.path.isfile
        if name and not (path and exists(path)):
            self.found.fault(key, f"no such {kind}: {show(name)}")
        return path or name

    def source(self, name: str, key: str, expected: str, suffixes: tuple[str, ...]) -> str:
        """Returns a model's or data set's path. Shipped names and possible Hub names do not
        change.
        """
        if name in SHIPPED or not name:
            return name
        path = self.existing(name)
        if path is not None:
            return path
        is_path = (
            name.startswith((".", "/", "~"))
            or name.endswith(("/", *suffixes))
            or name.count("/") > 1
        )
        other = other_name(name)
        if other:
            self.found.fault(key, f"{show(name)} is {other}")
        elif is_path:
            self.found.fault(key, f"no such file or folder: {show(name)}")
        elif not HUB_NAME.fullmatch(name):
            self.found.fault(key, f"expected {expected}, found {show(name)}")
        return name

    def existing(self, path: str) -> str | None:
        """Returns the path, with ~ expanded, if it exists in the working directory or else next to
        the config file. Returns None otherwise.
        """
        expanded = os.path.expanduser(path)
        beside = os.path.normpath(os.path.join(self.found.folder, expanded))
        return next(filter(os.path.exists, (expanded, beside) if path else ()), None)


_RESOLVED: dict[str, Callable[[_Paths, Any, str], Any]] = {
    "run.output_dir": lambda _, name, key: os.path.expanduser(name),
    "model.path": _Paths.model,
    "model.adapters": functools.partial(_Paths.file, kind="folder"),
    "model.loader": _Paths.function,
    "data.source": _Paths.data,
    "data.image_folder": functools.partial(_Paths.file, kind="folder"),
    "data.chat_template": _Paths.file,
    "data.difficulty": _Paths.file,
    "data.transform": _Paths.function,
    "reward.functions": _Paths.rewards,
    "teacher.path": _Paths.model,
    "env.tools": _Paths.tools,
    "env.program": _Paths.program,
    "env.factory": functools.partial(_Paths.function, expected=f"a class, {FUNCTION_FORMS}"),
    "sft.completions": _Paths.completions,
}


def inconsistencies(config: Any) -> list[str]:
    """Returns a message for each key that is incompatible with another key."""
    faults: dict[str, str] = {}

    def expect(key: str, expected: str) -> None:
        faults.setdefault(key, _fault(config, key, expected))

    def holds(cause: str, only: str) -> bool:
        return config.value(cause) == only if only else bool(config.value(cause))

    for (cause, only), keys in _ONLY_IF.items():
        defaults = type(config.value(cause.partition(".")[0]))()  # the keys are in its section
        for key in () if holds(cause, only) else keys:
            default = getattr(defaults, key.partition(".")[2])
            if config.value(key) != default:
                expect(key, f"{show(default)}, or {cause}{f' = {show(only)}' if only else ''}")
    for (cause, only), keys in _EXCLUDED_BY.items():
        for key in keys if holds(cause, only) and cause not in faults else ():
            value = config.value(key)
            if value:
                expect(key, f"{show(type(value)())} with {cause} = {show(config.value(cause))}")

    model = config.model
    data = config.data
    rollout = config.rollout
    loss = config.loss
    env = config.env
    rewards = config.reward.functions
    weights = config.reward.weights
    hint = config.teacher.hint
    rows = config.optim.batch_size * rollout.num_generations
    modes = {rollout.quantization, loss.ref_quantization} - {"none"}
    measures = rewards or config.sft.only or env.factory or env.agents
    or_measured = "or an env.factory whose class has get_reward"
    for key, wrong, expected in (
        ("loss.overlong.buffer", loss.overlong and loss.overlong.buffer > rollout.max_new_tokens,
            f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"),
        ("optim.minibatches", config.optim.minibatches > rows,
            f"at most {rows}, the completions of a batch step"),
        ("rollout.first_stage", rollout.first_stage >= rollout.num_generations,
            "less than rollout.num_generations"),
        ("env.taskset", env.taskset and not env.taskset.startswith(TASKSETS),
            f'a name such as "{TASKSETS}ID"'),
        ("rollout.first_stage", rollout.first_stage and env.answers, "0 with [env]"),
        ("data.pass_reward", data.pass_reward != 1.0 and REWARD_NAMES[0] in rewards,
            f"1.0 with {REWARD_NAMES[0]}, where right answers pass"),
        ("data.difficulty", data.curriculum == "static" and not data.difficulty,
            'a file written by `grpo difficulty`, with data.curriculum = "static"'),
        ("rollout.group_size",
            rollout.group_size and modes and not any(map(rollout.group_size_of, modes)),
            f"0 with {' and '.join(sorted(modes))}, whose group size is fixed"),
        ("rollout.bits_budget",
            rollout.bits_budget and (rollout.quantization not in _BUDGETED
                or rollout.calibration == "none" or data.image),
            '0, or "affine-4" (or -3, -6) in rollout.quantization and rollout.calibration = '
            '"activations", without images'),
        ("loss.ref_quantization", loss.ref_quantization != "none" and model.tune != "full",
            f'"none" with model.tune = {show(model.tune)}, where the reference is the unchanged '
            "base"),
        ("loss.ref_mixup",
            loss.ref_sync_every and loss.ref_mixup < 1 and loss.ref_quantization != "none",
            "1.0, or loss.ref_sync_every = 0, with loss.ref_quantization = "
            f"{show(loss.ref_quantization)}, which keeps no weights that could be mixed"),
        ("model.tune", model.adapters and model.tune == "full",
            '"lora" or "dora" with model.adapters'),
        ("data.answer", not measures and not data.answer,
            f"a column, your own reward in reward.functions, {or_measured}"),
        ("reward.functions", not measures and data.answer,
            "at least one entry"
            f"{f' with answer.form = {show(NONE)}' if config.answer.form == NONE else ''}"
            f", {or_measured}"),
        ("reward.weights", weights and len(weights) != len(rewards),
            f"a list of {len(rewards)}, one for each of reward.functions"),
        ("reward.weights", weights and not any(weights), "a value other than 0"),
        ("teacher.hint", config.teacher.path == SELF and not hint,
            f'a text with {{answer}} for the teacher, with teacher.path = "{SELF}"'),
        ("teacher.hint", hint and ("{answer}" not in hint or not data.answer),
            "a text with {answer}, and the column of reference answers in data.answer"),
    ):  # fmt: skip
        if wrong:
            expect(key, expected)
    unread = (condition_fault(text, rewards) for text in config.stop.when)
    where = config.where("stop.when")
    return [*faults.values(), *(f"{where}: {fault}" for fault in unread if fault)]


def check_complete(config: Any) -> None:
    """Raises ConfigError for faults that only the core detects: keys that require a reference model
    or turns, groups without variance that are divided by their own standard deviation, and unknown
    mechanisms.
    """
    from grpo_fn.backends import check_mechanism

    loss = config.loss
    optim = config.optim
    of_batch = loss.baseline == "batch_mean"
    of_turn = loss.baseline == "turn"
    turns = config.env.answers
    about_turns = "[env], because it applies to turns"
    stale = config.rollout.max_staleness
    apart = config.ranks.samplers
    rows = (
        ("loss.ref_sync_every", loss.ref_sync_every and not loss.beta,
            "0, or loss.beta > 0 (without a reference there is nothing to sync)"),
        ("loss.ref_quantization", loss.ref_quantization != "none" and not loss.beta,
            '"none", or loss.beta > 0 (without a reference there is nothing to quantize)'),
        ("loss.scale", of_batch and loss.scale == "group",
            '"batch" or "none" with loss.baseline = "batch_mean" (a group whose rewards are all '
            "equal has a deviation of 0)"),
        ("loss.scale", of_turn and loss.scale == "batch",
            '"group" or "none" with loss.baseline = "turn"'),
        ("rollout.max_staleness", stale and loss.correction == "none" and loss.surrogate != "ipo",
            '0, or a loss.correction such as "token_truncate", because older weights sample'),
        ("loss.dynamic_sampling", stale and loss.dynamic_sampling,
            "false with rollout.max_staleness, which fixes the next prompts in advance"),
        ("loss.sync_every", stale and loss.sync_every > optim.gradient_accumulation_steps,
            "at most optim.gradient_accumulation_steps with rollout.max_staleness"),
        ("loss.router_replay", stale and loss.router_replay, "false with rollout.max_staleness"),
        ("rollout.max_staleness", stale and optim.num_iterations * optim.minibatches > 1,
            "0, or 1 for optim.num_iterations and optim.minibatches"),
        ("ranks.samplers", apart and not stale,
            "0, or rollout.max_staleness >= 1, without which sampling and learning take turns"),
        ("rollout.quantization", apart and config.rollout.quantization != "none",
            '"none" with ranks.samplers'),
        ("env.program", apart and config.env.program, "[] with ranks.samplers"),
        ("env.taskset", apart and config.env.taskset, '"" with ranks.samplers'),
        ("loss.baseline", of_turn and not turns, about_turns),
        ("loss.discount", loss.discount < 1 and not turns, about_turns),
        ("rollout.first_stage", of_batch and config.rollout.first_stage,
            '0 with loss.baseline = "batch_mean", where groups without variance have a gradient '
            "too"),
    )  # fmt: skip
    faults = [_fault(config, key, expected) for key, wrong, expected in rows if wrong]
    for name in config.system.disable:
        try:
            check_mechanism(name)
        except ValueError as error:
            faults.append(f"{config.where('system.disable')}: {error}")
    if faults:
        raise ConfigError(faults)


def _fault(config: Any, key: str, expected: str) -> str:
    return f"{config.where(key)}: expected {expected}, found {show(config.value(key))}"
