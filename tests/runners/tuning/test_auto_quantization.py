"""`rollout.quantization = "auto"`: what is measured, in which time, and what is taken."""

import json
from pathlib import Path

import attrs
import pytest

from runners.config.loading import load_config
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from runners.tuning import auto_quantization as auto
from runners.tuning.auto_quantization import resolve_quantization
from runners.tuning.quantization_choice import MeasuredFormat, choose_format
from tests.support.tiktoken_files import make_nanochat_folder
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, Notes, small

CPU = Platform(backend="cpu")
CONFIG = small(
    rollout={"quantization": "auto", "max_new_tokens": 6},
    reward=BY_LETTERS,
    optim={"learning_rate": 1e-6, "max_steps": 1},
)


@pytest.fixture(name="config")
def _config(tmp_path):
    def load(*overrides):
        (tmp_path / "train.toml").write_text(CONFIG)
        (tmp_path / "letters.py").write_text(LETTERS)
        return load_config(str(tmp_path / "train.toml"), [f"run.output_dir={tmp_path / 'out'}", *overrides])

    return load


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of two blocks: formats are as many as of a large one. Its layers are as wide as a group."""
    return make_nanochat_folder(tmp_path_factory.mktemp("models") / "tiny", width=64)


def row(name, speed, memory=100, kl=0.001, verdict=""):
    """A measured candidate."""
    return MeasuredFormat(quantization=name, tokens_per_second=speed, memory=memory, kl=kl, verdict=verdict)


FULL = row("none", 100.0, 200, 0.0)


@pytest.mark.parametrize(
    ("others", "room", "taken", "reason"),
    [
        ([row("affine-8", 150.0), row("affine-6", 140.0)], 300, "affine-8", "the fastest that fits"),
        ([row("affine-8", 150.0), row("affine-4", 300.0, kl=0.2)], 300, "affine-8", "the fastest"),
        ([row("affine-8", 104.0)], 300, "none", "no other is faster by 5 %"),
        ([row("affine-8", 50.0)], 300, "none", "no other is faster"),
        ([row("affine-8", 50.0)], 150, "affine-8", "the fastest that fits"),
        ([row("affine-8", 50.0, 120), row("affine-4", 60.0, 90, kl=0.2)], 80, "affine-8", "nothing fits"),
        ([row("affine-8", 900.0, kl=float("inf"))], 300, "none", "no other"),
        ([row("affine-8", 900.0, kl=float("nan"))], 300, "none", "no other"),
        (
            [MeasuredFormat(quantization="affine-8", verdict="no time left to measure it")],
            300,
            "none",
            "no other",
        ),
        ([], 300, "none", "no other"),
    ],
)
def test_the_fastest_that_fits_and_is_close_is_taken(others, room, taken, reason):
    """Speed decides among what fits the memory and the KL limit; noise and unmeasured candidates do not."""
    trial = choose_format([FULL, *others], room, 0.01)
    assert trial.choice == taken and trial.reason.startswith(reason)
    assert [r.quantization for r in trial.rows if r.verdict == "taken"] == [taken]
    assert trial.rows[0].quantization == "none"


def test_every_verdict_is_in_the_table():
    """A candidate that was not taken says why; numbers that were not taken are dashes."""
    rows = [
        FULL,
        row("affine-8", 150.0, 400),
        row("affine-4", 400.0, 500, kl=0.2),
        MeasuredFormat(quantization="mxfp4", verdict="no time left to measure it"),
    ]
    columns, lines = choose_format(rows, 300, 0.01).table()
    verdicts = {line[0]: line[-1] for line in lines}
    assert verdicts == {
        "none": "taken",
        "affine-8": "too large",
        "affine-4": "KL above 0.01, too large",
        "mxfp4": "no time left to measure it",
    }
    assert lines[3][1:5] == ("–", "–", "–", "–") and all(len(line) == len(columns) for line in lines)


def prompts_of(count=2, length=9):
    """Prompts of different lengths in the embedded model's vocabulary."""
    return [tuple(range(5, 5 + length + n)) for n in range(count)]


class Clock:
    """Time that passes at each look."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


def resolved(config, clock, path=None):
    """The config and trial of a model folder, or of the embedded model."""
    config = config.check()
    model = config.model if path is None else attrs.evolve(config.model, path=str(path))
    loaded = load_model(model, CPU)
    return resolve_quantization(config, loaded, prompts_of(), CPU, clock=clock)


def test_what_is_measured_is_the_run_s_own(config):
    """On the embedded model: speeds, KL in the order of the bits, full precision at 0, of every candidate."""
    after, trial = resolved(config("rollout.auto_kl_limit=100"), Clock(0.001))
    rows = {r.quantization: r for r in trial.rows}
    assert list(rows) == ["none", *auto.CANDIDATES]
    assert rows["none"].kl == rows["none"].difference == 0.0
    kl = [rows[name].kl for name in ("affine-8", "affine-6", "affine-4", "affine-3")]
    assert kl == sorted(kl) and kl[0] > 0
    assert all(r.tokens_per_second > 0 and r.memory > 0 for r in trial.rows)
    assert after.rollout.quantization == trial.choice


@pytest.mark.parametrize("step", [0.2, 1.0])
def test_the_time_is_kept(config, tiny, step):
    """However slow the machine, candidates are dropped rather than the twenty seconds passed."""
    clock = Clock(step)
    _, trial = resolved(config(), clock, path=tiny)
    assert clock.now < 20
    assert len(trial.rows) == 1 + len(auto.CANDIDATES) and trial.rows[0].tokens_per_second
    dropped = [r.quantization for r in trial.rows if r.verdict == "no time left to measure it"]
    assert dropped == list(auto.CANDIDATES[len(auto.CANDIDATES) - len(dropped) :])
    assert dropped or step < 0.5


def test_a_probe_that_crawls_is_not_measured_further(config, tiny, monkeypatch):
    """A candidate whose first tokens take all the time that is left is given up after them."""
    clock = Clock(0.01)
    sample = auto._Bench.sample

    def slow(bench, policy, params, prompts, tokens):
        drawn, seconds = sample(bench, policy, params, prompts, tokens)
        if "scales" in str(params):
            clock.now += 5
            seconds += 5
        return drawn, seconds

    monkeypatch.setattr(auto._Bench, "sample", slow)
    _, trial = resolved(config(), clock, path=tiny)
    assert clock.now < 20 and trial.choice == "none"
    assert "times as slow: not measured further" in trial.rows[1].verdict


def test_a_model_that_is_quantized_already_is_left_alone(config, tmp_path):
    """There is nothing to choose: both sides run the packed weights."""
    folder = make_model_folder(tmp_path / "model", "llama", quantize={"group_size": 32, "bits": 4})
    after, trial = resolved(config("model.tune=lora"), Clock(0.001), path=folder)
    assert (trial.choice, trial.rows, after.rollout.quantization) == ("none", (), "none")
    assert "quantized already" in trial.title


def test_a_lucky_timing_does_not_decide(config, tiny, monkeypatch):
    """The first timing of a candidate that looks fast is checked against full precision, and forgotten."""
    seen = []

    def rate(bench, policy, params):
        seen.append("packed" if "scales" in str(params) else "none")
        return 5000.0 if seen.count("packed") == 1 and seen[-1] == "packed" else 1000.0

    monkeypatch.setattr(auto._Bench, "rate", rate)
    _, trial = resolved(config("rollout.auto_kl_limit=100"), Clock(0.001), path=tiny)
    assert trial.choice == "none" and trial.rows[1].tokens_per_second == 1000.0
    assert seen[-4:] == ["none", "packed", "packed", "none"]


def test_the_choice_goes_on_as_if_it_had_been_written(config, tiny, monkeypatch):
    """The run samples with it, warns about the correction, shows the table and keeps the choice on disk."""
    monkeypatch.setattr(
        auto._Bench, "rate", lambda bench, policy, params: 2000.0 if "scales" in str(params) else 1000.0
    )
    shown = Notes()
    result = run_training(config("rollout.auto_kl_limit=100", f"model.path={tiny}"), report=shown)
    ((title, columns, rows),) = shown.tables
    assert 'rollout.quantization = "auto" takes affine-8' in title
    assert [line[0] for line in rows][:2] == ["none", "affine-8"] and columns[1] == "tokens/s"
    written = json.loads((result.folder / "config.resolved.json").read_text())
    assert (written["rollout"]["quantization"], written["rollout"]["storage"]) == ("affine-8", "packed")
    log = [json.loads(line) for line in (result.folder / "training_log.jsonl").read_text().splitlines()]
    assert log[0]["rollout/quantization"] == "affine-8"
    assert any("loss.correction" in line for line in shown.lines)


def test_measuring_leaves_the_run_as_it_was(config, tiny):
    """With the same choice the run is the one that a written config gives: prompts, keys and weights."""
    rewards = []
    for more in (["rollout.auto_kl_limit=1e-9"], ["rollout.quantization=none"]):
        fixed = ("optim.learning_rate=1e-4", "run.overwrite=true", f"model.path={tiny}")
        result = run_training(config(*fixed, *more), report=Quiet())
        log = (Path(result.folder) / "training_log.jsonl").read_text().splitlines()
        rewards.append((json.loads(log[0])["reward"], json.loads(log[0])["grad_norm"]))
        assert (
            json.loads((result.folder / "config.resolved.json").read_text())["rollout"]["quantization"]
            == "none"
        )
    assert rewards[0] == rewards[1] and rewards[0][1] > 0
