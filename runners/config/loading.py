"""Loads, checks and freezes a run's config before anything heavy is imported.

Precedence: defaults, then the loss preset's values, then the file's, then --set.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args

import attrs

from runners.answers.forms import AnswerForm, answer_form
from runners.config import checks, rules, sections
from runners.config.reading import (
    KeyPath,
    Settings,
    apply_override,
    key_hint,
    parse,
    read_settings,
)
from runners.errors import ConfigError, UserError, show
from runners.files.durable import save_text
from runners.files.json_files import open_file
from runners.files.run_files import RESOLVED
from runners.files.toml_files import toml_text

if TYPE_CHECKING:
    from grpo_fn import LossSpec


@attrs.frozen(kw_only=True)
class Config:
    """A run's complete config, with one attribute per section of the TOML file."""

    run: sections.RunConfig = attrs.field(factory=sections.RunConfig)
    model: sections.ModelConfig
    data: sections.DataConfig = attrs.field(factory=sections.DataConfig)
    answer: sections.AnswerConfig = attrs.field(factory=sections.AnswerConfig)
    rollout: sections.RolloutConfig = attrs.field(factory=sections.RolloutConfig)
    reward: sections.RewardConfig = attrs.field(factory=sections.RewardConfig)
    loss: sections.LossConfig = attrs.field(factory=sections.LossConfig)
    teacher: sections.TeacherConfig = attrs.field(factory=sections.TeacherConfig)
    optim: sections.OptimConfig = attrs.field(factory=sections.OptimConfig)
    sft: sections.SftConfig = attrs.field(factory=sections.SftConfig)
    env: sections.EnvConfig = attrs.field(factory=sections.EnvConfig)
    eval: sections.EvalConfig = attrs.field(factory=sections.EvalConfig)
    checkpoint: sections.CheckpointConfig = attrs.field(factory=sections.CheckpointConfig)
    log: sections.LogConfig = attrs.field(factory=sections.LogConfig)
    watch: sections.WatchConfig = attrs.field(factory=sections.WatchConfig)
    stop: sections.StopConfig = attrs.field(factory=sections.StopConfig)
    ranks: sections.RanksConfig = attrs.field(factory=sections.RanksConfig)
    system: sections.SystemConfig = attrs.field(factory=sections.SystemConfig)
    settings: Settings | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are searched for custom files and modules: the current folder, then the
        config's folder.
        """
        return (Path.cwd(), *([self.settings.folder] if self.settings else []))

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages about unused values in the file."""
        return tuple(self.settings.notices) if self.settings else ()

    def where(self, key: str) -> str:
        """Returns the origin of `section.key` for messages, such as `train.toml: data.source`."""
        return self.settings.where(tuple(key.split("."))) if self.settings else key

    def value(self, key: str) -> Any:
        """Returns the value of `section.key`."""
        return functools.reduce(getattr, key.split("."), self)

    def having(self, section: str, **values: Any) -> Self:
        """Returns this config with other values in a section."""
        return attrs.evolve(self, **{section: attrs.evolve(getattr(self, section), **values)})

    @property
    def answer_form(self) -> AnswerForm | None:
        """Answer format, or None if no answer is extracted."""
        answer = self.answer
        return answer_form(
            answer.form,
            ignore_case=answer.ignore_case,
            ignore_spaces=answer.ignore_spaces,
            given=self.data.nudge,
            thoughts=self.data.thoughts,
            program_seconds=answer.program_seconds,
            partial_sandbox=answer.partial_sandbox,
        )

    def loss_spec(self) -> "LossSpec":
        """Returns the LossSpec for [loss]: the preset's, with the given fields replaced.

        Raises ConfigError if the combination is invalid. Calling this method imports grpo_fn, and
        therefore MLX.
        """
        from grpo_fn import LossSpec, preset

        changes = {
            name: getattr(self.loss, name)
            for name in attrs.fields_dict(LossSpec)
            if getattr(self.loss, name) is not None
        }
        try:
            return preset(self.loss.preset, **changes)
        except ValueError as error:
            named = [name for name in changes if re.search(rf"\b{name}\b", str(error))]
            key = f"loss.{named[0]}" if named else "loss.preset"
            raise ConfigError([f"{self.where(key)}: {error}"]) from error

    def check(self) -> Self:
        """Returns this config with a complete [loss]. Fields that were not set have the preset's
        values.

        Raises the errors of `loss_spec`. Calling this method imports grpo_fn, and therefore MLX.
        """
        from grpo_fn import PRESETS

        spec = self.loss_spec()
        recipe = PRESETS[self.loss.preset]
        # GDPO first normalises each reward in its group, so the sum is centred and scaled over the
        # batch.
        gdpo = self.reward.aggregate == "normalize_then_sum"
        of_batch = self.loss.baseline == "batch_mean" and recipe.scale == "group"
        preset_values = {
            **{name: getattr(spec, name) for name in attrs.fields_dict(type(spec))},
            "baseline": "batch_mean" if gdpo else recipe.baseline,
            "scale": "batch" if gdpo or of_batch else recipe.scale,
            "dynamic_sampling": recipe.dynamic_sampling,
            "overlong": sections.OverlongConfig(
                buffer=round(recipe.overlong * self.rollout.max_new_tokens)
            ),
        }
        absent = {
            name: value for name, value in preset_values.items() if getattr(self.loss, name) is None
        }
        complete = self.having("loss", **absent)
        checks.check_complete(complete)
        return complete

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the sections for JSON, without the keys that are left to the preset."""
        return {
            name: attrs.asdict(
                getattr(self, name),
                filter=lambda _, value: value is not None,
                value_serializer=lambda _, __, value: (
                    list(value) if isinstance(value, tuple) else value
                ),
            )
            for name in SECTIONS
        }

    def to_toml(self) -> str:
        """Returns the sections as TOML, from which `load_config` reads an equal config."""
        return toml_text(self.to_dict())


SECTIONS: dict[str, Any] = {
    field.name: field.type
    for field in attrs.fields(attrs.resolve_types(Config))
    if field.name != "settings"
}


def load_config(
    config: str | None,
    overrides: Sequence[str] = (),
    *,
    recorded: Mapping[str, Mapping[str, Any]] | None = None,
    label: str = "--set",
) -> Config:
    """Loads the config from a TOML file, or from the packaged preset with that name, with
    `section.key=value` overrides.

    The file may also be a run's config.resolved.json. If `config` is None, the defaults and the
    overrides are used. In this case, `recorded` may contain further values by section and key,
    whose origin is called `label` in messages.

    Relative paths are looked up in the current folder first, then next to the file.

    Raises ConfigError if the config is invalid. The message has one line per error: file, key,
    expected and found value, and the nearest spelling.
    """
    found = Settings(label=label, folder=Path())
    if config is not None:
        found = read_settings(str(config), KEYS)
    for section, table in (recorded or {}).items():
        found.put((section,), table, label)
    for override in overrides:
        apply_override(found, override, KEYS)
    if found.problems and not found.values:
        raise ConfigError(found.problems)
    built: dict[str, Any] = {}
    for name in dict.fromkeys([*found.values, *SECTIONS]):  # faults are in the order of the file
        built[name] = _build(name, found.values.get(name, {}), found)
    built = checks.resolved_sections(built, found)
    if None in built.values():
        raise ConfigError(found.problems)
    loaded = Config(**built, settings=found)
    faults = [*found.problems, *checks.inconsistencies(loaded)]
    if faults:
        raise ConfigError(faults)
    return loaded


def write_resolved(config: Config) -> Path:
    """Writes output_dir/name/config.resolved.json, which contains only sections, and returns its
    path.

    A crash leaves either the old or the new file. Raises UserError if the folder cannot be written
    to.
    """
    path = Path(config.run.output_dir) / config.run.name / RESOLVED
    content = json.dumps(config.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    save_text(path, content)
    return path


def known_values(path: KeyPath, raw: Any, found: Settings) -> dict[str, Any]:
    """Returns the valid values of a table's known keys. Other keys are added to
    `found.problems`.
    """
    if not isinstance(raw, Mapping):
        found.fault(path, f"expected a table, found {show(raw)}")
        return {}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        place = (*path, key)
        if place in KEYS:
            try:
                rules.check(value, KEYS[place])
                values[key] = value
            except rules.Mismatch as error:
                found.fault(place, error.reason(value))
        elif any(known[: len(place)] == place for known in KEYS):
            values[key] = known_values(place, value, found)
        else:
            found.fault(place, f"unknown key{key_hint(place, KEYS)}")
    return values


def _build(name: str, raw: Any, found: Settings) -> Any:
    """Builds a section from its raw table, or returns None if the table has faults. Faults are
    added to `found.problems`.
    """
    before = len(found.problems)
    values = known_values((name,), raw, found)
    # the one key without a default
    if name == "model" and isinstance(raw, Mapping) and "path" not in raw:
        found.fault((name, "path"), f"expected a string: {checks.EXPECTED_MODEL}, found nothing")
    return None if len(found.problems) > before else rules.structure(values, SECTIONS[name])


def _leaves(kind: Any, path: KeyPath) -> dict[KeyPath, attrs.Attribute]:
    found: dict[KeyPath, attrs.Attribute] = {}
    for field in attrs.fields(kind):
        place = (*path, field.name)
        nested = next(filter(attrs.has, (field.type, *get_args(field.type))), None)  # a table
        found |= _leaves(nested, place) if nested else {place: field}
    return found


KEYS: dict[KeyPath, attrs.Attribute] = dict(
    chain.from_iterable(_leaves(cls, (name,)).items() for name, cls in SECTIONS.items())
)
"""The field of every key, by its path."""


def run_of(model: str) -> Path | None:
    """Returns the config.resolved.json of the run that a folder is or belongs to, or None if there
    is no run.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    files = (folder / RESOLVED, folder.resolve().parent / RESOLVED)
    return next(filter(Path.is_file, files), None)


def read_recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Reads the values in a run's config.resolved.json, by section and key, in JSON's types.

    The file is untrusted, like its folder: only the config's own keys with possible values are
    used, and only as values. Anything else is ignored. Raises UserError if the file is not a
    regular file, or cannot be read as a JSON object.
    """
    found = Settings(label=str(file), folder=Path())
    return {
        name: known_values((name,), table, found)
        for name, table in parse(file, str(file), open_file).items()
        if name in SECTIONS
    }


def recorded_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the config values of a folder's run, or an empty table if they cannot be read."""
    try:
        return read_recorded(folder / RESOLVED)
    except UserError:  # damaged, being replaced, or from before such files
        return {}


def explain(name: str) -> str:
    """Describes a key such as "optim.eps", or all keys in a section or table, for `grpo-run
    --explain`.

    Raises ConfigError, with the nearest spelling, for an unknown key.
    """
    asked = tuple(name.split("."))
    found = {path: field for path, field in KEYS.items() if path[: len(asked)] == asked}
    if not found:
        raise ConfigError([f"{name}: unknown key{key_hint(asked, KEYS)}"])
    parts = []
    for path, field in found.items():
        kind, default, within, meaning = (cell.replace("`", "") for cell in rules.cells(field))
        limits = f"; {within}" if within not in ("any", "–") else ""
        parts.append(f"{'.'.join(path)}: {kind}, default {default}{limits}\n  {meaning}")
    return "\n".join(parts)
