"""The logs: one valid JSON object a line whatever comes in, and dashboards that get the same numbers."""

import json
import math
import sys
import types

import attrs
import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.config.sections import LogConfig
from runners.errors import UserError
from runners.files.json_files import to_json
from runners.files.json_lines import JsonLines
from runners.telemetry.log import MetricsLog
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from tests.support.resuming import config_in

NAN, INF = math.nan, math.inf

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def refuse_constant(name):
    """json.loads calls this for NaN and Infinity, which are not JSON."""
    raise AssertionError(f"{name} was written")


@given(st.dictionaries(st.text().filter(lambda name: name != "nonfinite"), values, max_size=5))
def test_any_record_is_one_line_of_strict_json(record):
    """No constant that JSON lacks, no line break for any reader; finite values come back unchanged."""
    line, nonfinite = to_json(record)
    assert line.splitlines() == [line]
    back = json.loads(line.encode("utf-8", "backslashreplace"), parse_constant=refuse_constant)
    assert back.pop("nonfinite", []) == nonfinite
    assert back.keys() == record.keys()
    if not nonfinite:
        assert back == record


def test_nonfinite_numbers_become_null_and_are_named():
    """null plus the names, dotted where nested, so that nothing is lost in silence."""
    line, _ = to_json({"loss": NAN, "kl": -INF, "em": 0.5, "rewards": {"a": [1.0, INF]}})
    assert json.loads(line) == {
        "loss": None,
        "kl": None,
        "em": 0.5,
        "rewards": {"a": [1.0, None]},
        "nonfinite": ["loss", "kl", "rewards.a.1"],
    }


def test_arrays_of_no_dimension_are_numbers():
    """Stats come as 0-d arrays, bfloat16 among them; integers stay integers."""
    record = {
        "loss": mx.array(0.25),
        "b": mx.array(1.5, mx.bfloat16),
        "update": mx.array(3),
        "bad": mx.array(NAN),
    }
    line, nonfinite = to_json(record)
    back = json.loads(line)
    assert (back["loss"], back["b"], back["update"], back["bad"]) == (0.25, 1.5, 3, None)
    assert isinstance(back["update"], int)
    assert nonfinite == ["bad"]


def test_what_json_cannot_hold_is_refused_by_name():
    """An array with dimensions is no metric; the error says which name had it."""
    with pytest.raises(TypeError, match=r"rewards\.1: a array"):
        to_json({"rewards": [1.0, mx.zeros((2,))]})


def test_log_lines_are_on_disk_at_once(tmp_path):
    """Another process sees each line before the run ends; completions have their own file."""
    with MetricsLog(tmp_path, LogConfig()) as log:
        log.log({"update": 1, "reward": 0.5})
        log.completions([{"update": 1, "text": "línea\u2028 \x85"}, {"update": 1, "text": "\ud800"}])
        assert json.loads((tmp_path / "training_log.jsonl").read_text()) == {"update": 1, "reward": 0.5}
        texts = [
            json.loads(line)["text"] for line in (tmp_path / "completions.jsonl").read_bytes().splitlines()
        ]
    assert texts == ["línea\u2028 \x85", "\ud800"]


def test_files_that_are_turned_off_are_not_there(tmp_path):
    """log.jsonl = false and log.completions = false leave no file."""
    with MetricsLog(tmp_path, LogConfig(jsonl=False, completions=False)) as log:
        log.log({"update": 1})
        log.completions([{"text": "x"}])
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_keeps_the_older_log_beside_its_own(tmp_path):
    """A second run of one name starts a file of its own and loses nothing of the first."""
    for update in (1, 2):
        with MetricsLog(tmp_path, LogConfig(completions=False)) as log:
            log.log({"update": update})
    assert json.loads((tmp_path / "training_log.jsonl").read_text()) == {"update": 2}
    assert json.loads((tmp_path / "training_log.previous.jsonl").read_text()) == {"update": 1}


@pytest.mark.parametrize("rest", ["", '{"update": 2, "rew'])
def test_appending_continues_after_the_last_whole_line(tmp_path, rest):
    """A run killed in the middle of a line leaves a file that is valid again once it is continued."""
    file = tmp_path / "training_log.jsonl"
    file.write_text('{"update": 1}\n' + rest)
    lines = JsonLines(file, keep=1 << 30)
    lines.write({"update": 2})
    lines.close()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"update": 1}, {"update": 2}]


@pytest.mark.parametrize("key", ["tensorboard", "wandb", "trackio"])
def test_a_missing_dashboard_names_its_package_before_anything_is_written(tmp_path, monkeypatch, key):
    """The error has the key and the pip line, and comes before the run's files."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    package = {"tensorboard": "tensorboardX"}.get(key, key)
    with pytest.raises(UserError, match=f"log.{key} = true .* `pip install {package}`"):
        MetricsLog(tmp_path, attrs.evolve(LogConfig(), **{key: True}))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_dashboard_ends_a_run_before_the_model_is_loaded(tmp_path, monkeypatch):
    """Also before anything of an earlier run is removed."""
    monkeypatch.setattr("runners.telemetry.dashboards._missing", lambda key, package: f"{package} is missing")
    monkeypatch.setattr("runners.training.start.build_run", None)
    final = tmp_path / "tiny" / "final"
    final.mkdir(parents=True)
    with pytest.raises(UserError, match=r"^trackio is missing$"):
        run_training(config_in(tmp_path, "run.overwrite=true", "log.trackio=true"), report=Quiet())
    assert final.is_dir()


def test_a_dashboard_that_does_not_start_is_a_user_error(tmp_path, monkeypatch):
    """No login, say: the package's own reason, in one line with the key."""
    fake_dashboards(monkeypatch)

    def refuse(**_):
        raise RuntimeError("api_key not configured\nsee the manual")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(
        UserError, match=r"log\.wandb = true, but wandb does not start: api_key not configured$"
    ):
        MetricsLog(tmp_path, LogConfig(wandb=True))


def fake_dashboards(monkeypatch):
    """Stand-ins for the three packages, recording calls with the names and arguments of the real ones."""
    calls = []

    class Writer:
        def __init__(self, logdir, purge_step):
            calls.append(("writer", logdir.rsplit("/", 1)[-1], purge_step))

        def add_text(self, tag, text, step=None):
            calls.append(("text", tag))

        def add_histogram(self, tag, values, step):
            calls.append(("histogram", tag, step))

        def add_scalar(self, tag, value, step):
            calls.append(("scalar", tag, value, step))

        def close(self):
            calls.append(("writer closed",))

    class Run:
        def define_metric(self, name, step_metric=None):
            pass

        def log(self, metrics):
            calls.append(("wandb", metrics))

        def finish(self):
            calls.append(("wandb finished",))

    modules = {
        "tensorboardX": types.SimpleNamespace(SummaryWriter=Writer),
        "wandb": types.SimpleNamespace(
            init=lambda **settings: calls.append(("wandb init", settings)) or Run(),
            Table=lambda *, columns, data: ("table", columns, data),
        ),
        "trackio": types.SimpleNamespace(
            init=lambda **settings: calls.append(("trackio init", settings)),
            Table=lambda *, columns, data: ("table", columns, data),
            log=lambda metrics, step: calls.append(("trackio", metrics, step)),
            finish=lambda: calls.append(("trackio finished",)),
        ),
    }
    for name, module in modules.items():
        module.__spec__ = importlib_spec(name)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def importlib_spec(name):
    """find_spec reads a loaded module's __spec__."""
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


def test_dashboards_get_finite_numbers_at_the_update(tmp_path, monkeypatch):
    """All three get the same numbers, without text and NaN, and are finished at the end."""
    calls = fake_dashboards(monkeypatch)
    settings = LogConfig(jsonl=False, completions=False, tensorboard=True, wandb=True, trackio=True)
    with MetricsLog(tmp_path, settings, name="run", config={"run": {"seed": 0}}) as log:
        log.log({"update": mx.array(7), "loss": 0.5, "kl": NAN, "who": "text", "flag": True})
    numbers = {"update": 7, "loss": 0.5}
    assert ("scalar", "loss", 0.5, 7) in calls and ("scalar", "update", 7, 7) in calls
    assert ("wandb", numbers) in calls and ("trackio", numbers, 7) in calls
    assert calls[-3:] == [("writer closed",), ("wandb finished",), ("trackio finished",)]
    assert not [call for call in calls if "kl" in call or "flag" in call]
