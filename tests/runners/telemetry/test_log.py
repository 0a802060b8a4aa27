"""The logs: one valid JSON object per line for any input, and dashboards with the same numbers."""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock, call

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config.loading import Config
from runners.config.sections import LogConfig, ModelConfig
from runners.errors import UserError
from runners.files.json_files import JsonLines, to_json
from runners.telemetry.events import Completions
from runners.telemetry.log import MetricsLog
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import config_in

NAN, INF = math.nan, math.inf
DASHBOARDS = {"jsonl": False, "completions": False, "tensorboard": True, "wandb": True}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def logged(**settings):
    """A config with these values in [log]."""
    return Config(model=ModelConfig(path="embedded"), log=LogConfig(**settings))


def refuse_constant(name):
    """json.loads calls this for NaN and Infinity, which are not JSON."""
    raise AssertionError(f"{name} was written")


@given(st.dictionaries(st.text().filter(lambda name: name != "nonfinite"), values, max_size=5))
def test_any_record_is_one_line_of_strict_json(record):
    """The line has no NaN and no line break of any kind; finite values are unchanged."""
    line = to_json(record)
    assert line.splitlines() == [line]
    back = json.loads(line.encode("utf-8", "backslashreplace"), parse_constant=refuse_constant)
    nonfinite = back.pop("nonfinite", [])
    assert back.keys() == record.keys() and bool(nonfinite) == (back != record)


def test_nonfinite_numbers_become_null_and_are_named():
    """Nested names are dotted; 0-d arrays become numbers, and integers stay integers."""
    record = {
        "loss": mx.array(NAN),
        "em": mx.array(1.5, mx.bfloat16),
        "n": mx.array(3),
        "r": {"a": [1.0, INF]},
    }
    assert json.loads(to_json(record)) == {
        "loss": None, "em": 1.5, "n": 3, "r": {"a": [1.0, None]}, "nonfinite": ["loss", "r.a.1"],
    }  # fmt: skip
    with pytest.raises(TypeError, match=r"rewards\.1: a array"):
        to_json({"rewards": [1.0, mx.zeros((2,))]})


def test_log_lines_are_on_disk_at_once(tmp_path):
    """Other processes can read each line before the run ends; completions have a separate file."""
    with MetricsLog(tmp_path, logged()) as log:
        log.log({"update": 1, "reward": 0.5})
        log.handle(Completions([{"text": "línea\u2028 \x85"}, {"text": "\ud800"}]))
        assert json.loads((tmp_path / "training_log.jsonl").read_text()) == {"update": 1, "reward": 0.5}
        lines = (tmp_path / "completions.jsonl").read_bytes().splitlines()
        assert [json.loads(line)["text"] for line in lines] == ["línea\u2028 \x85", "\ud800"]


@pytest.mark.parametrize("rest", ["", '{"update": 2, "rew'])
def test_appending_continues_after_the_last_whole_line(tmp_path, rest):
    """The file of a run that was killed within a line is valid again once it is continued."""
    file = tmp_path / "training_log.jsonl"
    file.write_text('{"update": 1}\n' + rest)
    lines = JsonLines(file, keep=1 << 30)
    lines.write({"update": 2})
    lines.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"update": 1}, {"update": 2}]


@pytest.mark.parametrize("key", ["tensorboard", "wandb"])
def test_a_missing_dashboard_names_its_package_before_anything_is_written(tmp_path, monkeypatch, key):
    """The error has the key and the pip command; an older run's files are not deleted."""
    monkeypatch.setattr("runners.telemetry.log.find_spec", lambda name: None)
    package = {"tensorboard": "tensorboardX"}.get(key, key)
    line = f"log.{key} = true .* `pip install {package}`"
    (tmp_path / "tiny" / "final").mkdir(parents=True)
    with pytest.raises(UserError, match=line):
        run_training(config_in(tmp_path, "run.overwrite=true", f"log.{key}=true"), report=Quiet())
    assert (tmp_path / "tiny" / "final").is_dir()


@pytest.fixture
def dashboards(monkeypatch):
    """Replacements for the two packages that record their calls."""
    modules = {name: MagicMock(__spec__=ModuleSpec(name, None)) for name in ("tensorboardX", "wandb")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return tuple(modules.values())


def test_dashboards_get_finite_numbers_at_the_update(tmp_path, dashboards):
    """Both receive the same numbers, without text and NaN, and are closed at the end."""
    writer, run = dashboards[0].SummaryWriter.return_value, dashboards[1].init.return_value
    with MetricsLog(tmp_path, logged(**DASHBOARDS)) as log:
        log.log({"update": mx.array(7), "loss": 0.5, "kl": NAN, "who": "text", "flag": True})
        assert not writer.close.called and not run.finish.called
    assert writer.add_scalar.call_args_list == [call("update", 7, 7), call("loss", 0.5, 7)]
    run.log.assert_called_once_with({"update": 7, "loss": 0.5}, step=7)
    assert writer.close.called and run.finish.called


def test_a_resumed_run_goes_on_in_its_own(tmp_path, dashboards):
    """Project, entity and name come from the config, the id from the folder; a new run has a new id."""
    config = logged(**DASHBOARDS, project="p", entity="team", run_name="shown")

    def started(**more):
        MetricsLog(tmp_path, config, **more).close()
        return [package.call_args.kwargs for package in (dashboards[0].SummaryWriter, dashboards[1].init)]

    (writer, first), (resumed, again), (_, other) = started(), started(keep={}, update=4), started()
    assert (first["project"], first["entity"], first["name"]) == ("p", "team", "shown")
    assert first["resume"] is None and writer["purge_step"] is None
    assert (again["id"], again["resume"]) == (first["id"], "allow")
    assert resumed["purge_step"] == 5  # later updates are replaced
    assert other["id"] != first["id"]
