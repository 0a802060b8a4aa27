"""Checks beyond a single key: that files exist, and that keys fit each other. Nothing is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from runners.answers.forms import FORMS, NONE, answer_form
from runners.config.conditions import condition_fault
from runners.config.names import (
    CALCULATOR,
    EMBEDDED,
    REWARD_NAMES,
    SELF,
    SHIPPED,
    TASK_SCORE,
    TASKS,
)
from runners.config.reading import PRESET_FOLDER, Settings
from runners.config.user_functions import FUNCTION_FORMS
from runners.errors import did_you_mean, show
from runners.files.run_files import COMPLETIONS

EXPECTED_MODEL = f'"{EMBEDDED}", a model folder or a name on the Hugging Face Hub'
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_EXPECTED_DATA = f'"{EMBEDDED}", a file or folder ({", ".join(_DATA_SUFFIXES)}) or a name on the Hub'
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GSM8K = "openai/gsm8k"

# A key and its value → keys with the only value that goes with it.
_ONLY_WITH = {
    "data.image": {
        "model.loader": "",
        "env.factory": "",
        "env.tools": (),
        "loss.router_aux_coef": 0.0,
        "loss.router_replay": False,
    },
    "teacher.path": {"data.image": "", "rollout.first_stage": 0},
    "teacher.hint": {"env.factory": "", "env.tools": ()},
}

# A key and its value ("": any) → keys that change nothing without it.
_ONLY_IF = {
    ("data.image", ""): ("data.image_max_pixels", "data.image_folder"),
    ("data.curriculum", "static"): ("data.pass_rates",),
    ("data.curriculum", "adaptive"): ("data.target_rate", "data.rate_decay", "data.explore"),
    ("teacher.path", ""): ("teacher.form", "teacher.weight", "teacher.task_weight", "teacher.hint"),
    ("sft.completions", ""): ("sft.min_reward",),
}

_CHATS_ONLY = (
    *("data.system_prompt", "data.chat_template", "data.chat_template_kwargs", "data.image"),
    *("env.factory", "env.tools"),
)


def check_sections(built: Mapping[str, Any], found: Settings) -> dict[str, Any]:
    """The sections with their paths resolved. A section that is None had faults and is left alone.

    Faults go to `found.problems`, one line each.
    """
    result, paths = dict(built), _Paths(found)
    for name in ("run", "model", "data", "reward", "teacher", "env", "sft"):
        if built[name] is not None:
            result[name] = attrs.evolve(built[name], **getattr(paths, name)(built[name]))
    if all(built[name] is not None for name in ("answer", "data", "reward")):
        result |= paths.task(result["answer"], result["data"], result["reward"])
    _relations(result, found)
    return result


@attrs.frozen
class _Paths:
    """The paths and functions of the sections: those that exist are resolved, others are faults."""

    found: Settings

    def fault(self, key: str, message: str) -> None:
        self.found.fault(tuple(key.split(".")), message)

    def run(self, run: Any) -> dict[str, Any]:
        folder = os.path.expanduser(run.output_dir)
        for path, key in ((folder, "run.output_dir"), (os.path.join(folder, run.name), "run.name")):
            if os.path.exists(path) and not os.path.isdir(path):
                self.fault(key, f"expected a folder or a free name, found the file {path}")
                break
        return {"output_dir": folder}

    def model(self, model: Any) -> dict[str, Any]:
        path = self.source(model.path, "model.path", EXPECTED_MODEL, (".safetensors",))
        if path not in SHIPPED and os.path.isfile(path):
            self.fault("model.path", f"expected the folder of a model, found the file {path}")
        adapters = self.existing(model.adapters) if model.adapters else ""
        if adapters is None:
            self.fault("model.adapters", f"no such folder: {show(model.adapters)}")
        return {
            "path": path,
            "adapters": adapters or model.adapters,
            "loader": self.function(model.loader, "model.loader"),
        }

    def teacher(self, teacher: Any) -> dict[str, Any]:
        if teacher.path == SELF:
            return {}
        return {"path": self.source(teacher.path, "teacher.path", EXPECTED_MODEL, (".safetensors",))}

    def data(self, data: Any) -> dict[str, Any]:
        folder = self.existing(data.image_folder) if data.image_folder else ""
        if data.image_folder and (folder is None or not os.path.isdir(folder)):
            self.fault("data.image_folder", f"no such folder: {show(data.image_folder)}")
        template = self.existing(data.chat_template) if data.chat_template else ""
        if data.chat_template and (template is None or not os.path.isfile(template)):
            self.fault("data.chat_template", f"no such file: {show(data.chat_template)}")
        difficulty = self.existing(data.difficulty) if data.difficulty else ""
        if data.difficulty and (difficulty is None or not os.path.isfile(difficulty)):
            self.fault(
                "data.difficulty", f"no such file: {show(data.difficulty)}; `grpo difficulty` makes one"
            )
        source = self.source(data.source, "data.source", _EXPECTED_DATA, _DATA_SUFFIXES)
        # The Hub has two configurations of GSM8K and no default.
        usual = "main" if source == _GSM8K and not os.path.exists(source) else ""
        return {
            "source": source,
            "name": data.name or usual,
            "image_folder": folder or data.image_folder,
            "chat_template": template or data.chat_template,
            "difficulty": difficulty or data.difficulty,
            "transform": self.function(data.transform, "data.transform"),
        }

    def sft(self, sft: Any) -> dict[str, Any]:
        file = self.existing(sft.completions) if sft.completions else ""
        if file and os.path.isdir(file):
            file = self.existing(os.path.join(file, COMPLETIONS))
        if file is None:
            self.fault("sft.completions", f"no such file or folder of a run: {show(sft.completions)}")
        return {"completions": file or sft.completions}

    def reward(self, reward: Any) -> dict[str, Any]:
        functions, weights = reward.functions, reward.weights
        if weights and len(weights) != len(functions):
            expected = f"{len(functions)}, one for each of reward.functions"
            self.fault("reward.weights", f"expected {expected}, found {len(weights)}")
        elif weights and not any(weights):
            self.fault("reward.weights", f"expected one that is not 0, found {show(weights)}")
        return {"functions": tuple(map(self._reward_function, functions))}

    def _reward_function(self, name: str) -> str:
        if name in REWARD_NAMES:
            return name
        hint = did_you_mean(name, REWARD_NAMES) or f"; built in are {', '.join(REWARD_NAMES)}"
        expected = f"a built-in reward, {FUNCTION_FORMS}"
        return self.function(name, "reward.functions", expected, "" if ":" in name else hint)

    def task(self, answer: Any, data: Any, reward: Any) -> dict[str, Any]:
        """The three sections with what belongs to the form of answers, where the config does not set it.

        The form's prompt is put only before questions of a chat: other texts and messages are whole prompts.
        """

        def given(key: str) -> bool:
            section, _, name = key.partition(".")
            return name in self.found.values.get(section, {})

        functions = reward.functions
        if not given("answer.form"):
            own = bool(functions) and not {*functions} & {*REWARD_NAMES, TASK_SCORE}
            answer = attrs.evolve(answer, form=NONE if own or not data.answer else answer.form)
        elif ":" in answer.form and answer.form.partition(":")[0] not in FORMS:
            answer = attrs.evolve(answer, form=self.function(answer.form, "answer.form"))
        try:
            form = answer_form(answer.form)
        except ValueError as error:
            self.fault("answer.form", f"expected {error}")
            return {}
        if form is not None and not data.answer:
            self.fault("answer.form", f'expected "{NONE}" with data.answer = "", found {show(answer.form)}')
        if not given("reward.functions") and data.source.startswith(TASKS):
            functions = (TASK_SCORE,)
        elif not given("reward.functions") and answer.form != "xml":
            functions = () if form is None else REWARD_NAMES[:1]
        asks = form if form is not None and not data.prompt and data.prompt_form != "raw" else None
        prompt = {"system_prompt": asks.instruction if asks else "", "nudge": asks.nudge if asks else ""}
        prompt = {key: value for key, value in prompt.items() if not given(f"data.{key}")}
        return {
            "answer": answer,
            "data": attrs.evolve(data, **prompt),
            "reward": attrs.evolve(reward, functions=functions),
        }

    def env(self, env: Any) -> dict[str, Any]:
        expected = f"{FUNCTION_FORMS}, or a file whose functions are tools"
        tools = tuple(
            self._python_file(name, "env.tools")
            if name.endswith(".py")
            else self.function(name, "env.tools", expected)
            for name in env.tools
        )
        if env.factory == CALCULATOR:
            return {"tools": tools}
        expected, hint = (
            f'"{CALCULATOR}" or a class, {FUNCTION_FORMS}',
            did_you_mean(env.factory, [CALCULATOR]),
        )
        return {"tools": tools, "factory": self.function(env.factory, "env.factory", expected, hint)}

    def function(self, name: str, key: str, expected: str = FUNCTION_FORMS, hint: str = "") -> str:
        """A custom function as a config names it, with the path of a Python file resolved; empty: none."""
        module, _, function = name.rpartition(":")
        is_file = module.endswith(".py")
        if not name:
            return name
        if not function.isidentifier() or not (is_file or all(map(str.isidentifier, module.split(".")))):
            self.fault(key, f"expected {expected}, found {show(name)}{hint}")
            return name
        return f"{self._python_file(module, key)}:{function}" if is_file else name

    def _python_file(self, name: str, key: str) -> str:
        path = self.existing(name)
        if path is None or not os.path.isfile(path):
            self.fault(key, f"no such file: {show(name)}")
        return path or name

    def source(self, name: str, key: str, expected: str, suffixes: tuple[str, ...]) -> str:
        """The path of a model or of data; a shipped name and a possible name on the Hub stay as they are."""
        if name in SHIPPED or not name or (key == "data.source" and name.startswith(TASKS)):
            return name
        if (path := self.existing(name)) is not None:
            return path
        is_path = name.startswith((".", "/", "~")) or name.endswith(("/", *suffixes)) or name.count("/") > 1
        if is_path or "\\" in name:
            relative = not os.path.isabs(os.path.expanduser(name))
            elsewhere = relative and self.found.folder.resolve() not in (Path.cwd(), PRESET_FOLDER)
            looked = f", neither here nor in {self.found.folder}" if elsewhere else ""
            self.fault(key, f"no such file or folder: {show(name)}{looked}")
        elif not _HUB_NAME.fullmatch(name):
            self.fault(key, f"expected {expected}, found {show(name)}")
        return name

    def existing(self, path: str) -> str | None:
        """The first that exists: `path` itself, with ~ expanded, or beside the config file."""
        expanded = os.path.expanduser(path)
        beside = os.path.normpath(os.path.join(self.found.folder, expanded))
        return next((candidate for candidate in (expanded, beside) if os.path.exists(candidate)), None)


def _relations(built: Mapping[str, Any], found: Settings) -> None:
    """Rejects keys that do not fit each other. Sections that are None had faults."""

    def value(key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(built[section], name, None)

    def expect(key: str, expected: str, shown: object = None) -> None:
        message = f"expected {expected}, found {show(value(key) if shown is None else shown)}"
        found.fault(tuple(key.split(".")), message)

    overlong, most = value("loss.overlong"), value("rollout.max_new_tokens")
    if overlong and most is not None and overlong.buffer > most:
        expect("loss.overlong.buffer", f"at most rollout.max_new_tokens = {most}", overlong.buffer)
    rows = (value("optim.batch_size") or 0) * (value("rollout.num_generations") or 0)
    if rows and value("optim.minibatches") > rows:
        expect("optim.minibatches", f"at most {rows}, the completions of a batch step")
    if first := value("rollout.first_stage"):
        if first >= (value("rollout.num_generations") or first + 1):
            expect("rollout.first_stage", "less than rollout.num_generations")
        if value("env.factory") or value("env.tools"):
            expect("rollout.first_stage", "0 with [env]")
    if value("data.pass_reward") not in (1.0, None) and REWARD_NAMES[0] in (value("reward.functions") or ()):
        expect("data.pass_reward", f"1.0 with {REWARD_NAMES[0]}, by which right answers pass")
    if value("data.curriculum") == "static" and not value("data.difficulty"):
        expect("data.difficulty", 'a file of `grpo difficulty` with data.curriculum = "static"')
    modes = {value("rollout.quantization"), value("loss.ref_quantization")} - {"none", None}
    if value("rollout.group_size") and modes and not any(map(built["rollout"].group_size_of, modes)):
        expect("rollout.group_size", f"0 with {' and '.join(sorted(modes))}, whose groups have a fixed size")
    if (budget := value("rollout.bits_budget")) and (
        value("rollout.quantization") not in ("affine-3", "affine-4", "affine-6")
        or value("rollout.calibration") == "none"
        or value("data.image")
    ):
        few = '"affine-4" (or -3, -6) in rollout.quantization and rollout.calibration = "activations"'
        expect("rollout.bits_budget", f"0, or {few}, without images", budget)
    mixes = value("loss.ref_sync_every") and value("loss.ref_mixup") < 1
    if (reference := value("loss.ref_quantization")) not in ("none", None):
        if value("model.tune") in ("lora", "dora"):
            tune = f"model.tune = {show(value('model.tune'))}, where the reference is the unchanged base"
            expect("loss.ref_quantization", f'"none" with {tune}')
        if mixes:
            cause = f"loss.ref_quantization = {show(reference)}, which keeps nothing to mix with"
            expect("loss.ref_mixup", f"1.0, or loss.ref_sync_every = 0, with {cause}")
    if value("model.adapters") and value("model.tune") == "full":
        expect("model.tune", '"lora" or "dora" with model.adapters')
    unused = set()
    for (cause, only), keys in _ONLY_IF.items():
        state = value(cause)
        for key in keys if state is not None and (state != only if only else not state) else ():
            section, _, name = key.partition(".")
            default = getattr(attrs.fields(type(built[section])), name).default
            if value(key) != default:
                unused.add(key)
                expect(key, f"{show(default)}, or {cause}{f' = {show(only)}' if only else ''}")
    for cause, only in _ONLY_WITH.items():
        for key, one in only.items() if value(cause) and cause not in unused else ():
            if value(key) not in (one, None):
                expect(key, f"{show(one)} with {cause} = {show(value(cause))}")
    for key in _CHATS_ONLY if value("data.prompt_form") == "raw" else ():
        if value(key):
            expect(key, f'{show(type(value(key))())} with data.prompt_form = "raw"')
    if value("reward.functions") == () and not value("sft.only") and value("env.factory") in ("", CALCULATOR):
        measured = "or an env.factory whose class has get_reward"
        if value("data.answer") == "":
            expect("data.answer", f"a column, your own reward in reward.functions, {measured}")
        else:
            unread = f' with answer.form = "{NONE}"' if value("answer.form") == NONE else ""
            expect("reward.functions", f"at least one entry{unread}, {measured}")
    hint = "" if "teacher.hint" in unused else value("teacher.hint")
    if value("teacher.path") == SELF and hint == "":
        expect(
            "teacher.hint", f'a text with {{answer}}, which the teacher reads, with teacher.path = "{SELF}"'
        )
    if hint and ("{answer}" not in hint or value("data.answer") == ""):
        expect("teacher.hint", "a text with {answer}, and a column of answers in data.answer")
    for text in (value("stop.when") or ()) if built["reward"] is not None else ():
        if fault := condition_fault(text, value("reward.functions")):
            found.fault(("stop", "when"), fault)
