"""From the config to a run: fixed keys, an answer measured once and kept, and the same tokens with each."""

import json

import attrs
import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.backends.cpu import blocked_weights as blocking
from runners.config.loading import load_config
from runners.config.sections import RolloutConfig
from runners.machine.launch_modes import launch_keywords
from runners.machine.startup import Platform
from runners.telemetry.report import Quiet
from runners.training.train import run_training
from runners.tuning import decode_choice, decode_settings
from runners.tuning.decode_choice import CHECKS
from runners.tuning.decode_settings import resolve_decoding
from runners.tuning.saved_answers import DecodeChoice, cache_file, recall
from runners.tuning.workload import Workload
from tests.support.tiny_policies import tiny_policy
from tests.support.tiny_runs import PROBLEMS

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17]]
SMALL = f"""
[model]
path = "embedded"
[data]
source = "{PROBLEMS}"
eval_split = "valid"
system_prompt = ""
[rollout]
num_generations = 4
max_new_tokens = 20
[optim]
batch_size = 4
max_steps = 2
[eval]
samples = 4
at_start = false
[checkpoint]
every = 0
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("GRPO_FN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def config(tmp_path):
    """A small run's config, with overrides."""
    path = tmp_path / "train.toml"
    path.write_text(SMALL, encoding="utf-8")
    return lambda *overrides: load_config(str(path), [f"run.output_dir={tmp_path / 'out'}", *overrides])


def fill(config, batch_steps, **platform):
    """`resolve_decoding` for the config, on a tiny model: the filled config's [rollout], and the lines."""
    policy = tiny_policy()
    work = Workload(
        policy=policy,
        params=policy.params,
        lengths=tuple(map(len, PROMPTS)),
        num_generations=config.rollout.num_generations,
        max_new_tokens=config.rollout.max_new_tokens,
        sampler=g.Sampler(),
    )
    filled, lines = resolve_decoding(
        config,
        work,
        model_config={"model_type": "llama"},
        state=policy.params,
        batch_steps=batch_steps,
        platform=Platform(**({"backend": "cpu", "device": "a CPU"} | platform)),
        say=lambda text: None,
    )
    assert attrs.evolve(filled, rollout=config.rollout) == config
    return filled.rollout, lines


def of(rollout: RolloutConfig):
    """The three keys."""
    return rollout.launch, rollout.check_every, rollout.max_batch


@pytest.fixture
def measured(monkeypatch):
    """Measurements are counted, and always find async and 16 in half batches best."""
    calls = []

    def measure(work, candidates):
        calls.append(candidates)
        return decode_choice.DecodeTimes({}, 16, 1.0), candidates, ""

    monkeypatch.setattr(decode_settings, "measure_decoding", measure)
    monkeypatch.setattr(decode_settings, "choose_decoding", lambda *_: DecodeChoice("async", 16, 8))
    monkeypatch.setattr(decode_settings, "_timings_line", lambda *_: "measured")
    return calls


def test_fixed_keys_touch_nothing(config, measured, monkeypatch):
    """No measurement, no look at the memory, no file read or written, not a line."""
    for name in ("recall", "remember", "free_memory"):
        monkeypatch.setattr(decode_settings, name, lambda *_: pytest.fail("touched"))
    fixed = config('rollout.launch="async"', "rollout.check_every=3", "rollout.max_batch=6")
    rollout, lines = fill(fixed, 10**6)
    assert of(rollout) == ("async", 3, 6) and lines == () and measured == []
    assert not cache_file().exists()


def test_measured_once_then_remembered(config, measured):
    """The second run reads the first one's answer; another device, length or wish is another question."""
    first, lines = fill(config(), 10**6)
    assert of(first) == ("async", 16, 8) and "(measured)" in lines[0] and len(lines) == 1
    again, lines = fill(config(), 10**6)
    assert again == first and len(measured) == 1
    assert lines == (
        f"decoding: async per step, a look every 16, 8 rows together (as found before: {cache_file()})",
    )
    fill(config(), 10**6, device="another CPU")
    fill(config("rollout.max_new_tokens=100"), 10**6)
    fill(config("rollout.num_generations=8"), 10**6)
    fill(config("rollout.check_every=4"), 10**6)
    assert len(measured) == 5
    fill(config("rollout.max_new_tokens=17"), 10**6)  # of the same power of two as 20
    fill(config("optim.learning_rate=0.5"), 10**6)
    assert len(measured) == 5
    fill(config(), 10**6, cores=16)
    fill(config(), 10**6, blas="another library")
    assert len(measured) == 7


def test_a_model_without_lanes_is_not_split(config, measured, monkeypatch):
    """It would be measured as another name of `eval`."""
    fill(config(), 10**6, cores=2)
    monkeypatch.setattr(blocking, "MOST_BYTES", 10)
    fill(config(), 10**6, cores=2)
    assert [candidates.launches for candidates in measured] == [("split", "eval", "async"), ("eval", "async")]


def test_what_is_fixed_stays(config, measured):
    """An answer fills only the keys that are open."""
    rollout, _ = fill(config("rollout.check_every=3", "rollout.max_batch=12"), 10**6)
    assert of(rollout) == ("async", 3, 12)
    assert (measured[0].groups, measured[0].checks) == ((3,), (3,))


def test_a_short_run_does_not_measure(config, measured):
    """The usual answer, which is no news, and no file; a GPU's usual answer is another."""
    rollout, lines = fill(config(), 2)
    assert of(rollout) == ("eval", 8, 0) and not cache_file().exists() and measured == []
    assert lines == ()
    assert of(fill(config(), 2, backend="metal")[0]) == ("async", 8, 0)


def test_memory_bounds_the_rows(config, measured, monkeypatch):
    """Rows that do not fit are not decoded together, measured or not, and the line says so."""
    monkeypatch.setattr(decode_settings, "free_memory", lambda limit: 10**6)
    rollout, lines = fill(config("rollout.max_new_tokens=250", "rollout.num_generations=2"), 2)
    assert rollout.max_batch == 4 and "; memory holds 4 (" in lines[0]
    limits = []
    monkeypatch.setattr(decode_settings, "free_memory", lambda limit: limits.append(limit) or 0)
    rollout, _ = fill(config("system.memory_limit_gb=3.5"), 2)
    assert rollout.max_batch == 4 and limits == [3.5]


def test_a_damaged_or_unwritable_cache_is_a_line(config, measured, tmp_path):
    """The run goes on with what it measured."""
    cache_file().parent.mkdir()
    cache_file().write_text("{")
    rollout, lines = fill(config(), 10**6)
    assert of(rollout) == ("async", 16, 8) and len(lines) == 2 and "damaged" in lines[1]
    cache_file().unlink()
    cache_file().parent.rmdir()
    cache_file().parent.write_text("in the way")
    rollout, lines = fill(config(), 10**6)
    assert of(rollout) == ("async", 16, 8) and "cannot be written" in lines[-1]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_candidate_changes_a_token(name):
    """Any two of launch, check_every and batch limit draw the very same completions and log-probs."""
    policy = tiny_policy(name)

    def roll(launch, check_every, max_batch):
        return g.generate(
            policy,
            policy.params,
            PROMPTS,
            key=mx.random.key(3),
            num_generations=4,
            max_new_tokens=24,
            eos_ids=range(4),
            decoding=g.Decoding(max_batch=max_batch, check_every=check_every, **launch_keywords(launch)),
        )

    want = roll("eval", 1, 0)
    assert len(set(want.lengths_b.tolist())) > 3
    for i, launch in enumerate(("eval", "async", "split")):
        for j, check_every in enumerate(CHECKS):
            max_batch = (0, 8, 4)[(i + j) % 3]
            got = roll(launch, check_every, max_batch)
            assert got.completions() == want.completions(), (launch, check_every, max_batch)
            assert mx.allclose(got.logp_bt, want.logp_bt, atol=1e-4).item()


def completions_of(result):
    """The texts and lengths that a run wrote down."""
    lines = (result.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["completion"], line["tokens"]) for line in map(json.loads, lines)]


def test_a_run_uses_and_keeps_the_choice(config, monkeypatch):
    """The choice reaches `generate`, config.resolved.json and the cache, and changes no completion."""
    monkeypatch.setattr(decode_settings, "reason_not_to_measure", lambda *_: None)
    monkeypatch.setattr(
        decode_settings, "measure_decoding", lambda work, candidates: (object(), candidates, "")
    )
    monkeypatch.setattr(decode_settings, "choose_decoding", lambda *_: DecodeChoice("async", 4, 8))
    monkeypatch.setattr(decode_settings, "_timings_line", lambda *_: "measured")
    seen, generate = [], g.generate
    monkeypatch.setattr(g, "generate", lambda *a, **k: seen.append(k) or generate(*a, **k))
    result = run_training(config(), report=Quiet())
    used = {k["decoding"] for k in seen if k["num_generations"] == 4}
    assert used == {g.Decoding(pipelined=True, check_every=4, max_batch=8)}
    resolved = json.loads((result.folder / "config.resolved.json").read_text(encoding="utf-8"))
    assert of(
        RolloutConfig(**{k: resolved["rollout"][k] for k in ("launch", "check_every", "max_batch")})
    ) == (
        "async",
        4,
        8,
    )
    answers = json.loads(cache_file().read_text())["answers"].values()
    [entry] = [answer for answer in answers if "launches" in answer["facts"]]  # not the model's check
    assert recall(cache_file(), entry["facts"])[0] == DecodeChoice("async", 4, 8)
    assert entry["facts"]["backend"] == "cpu" and entry["facts"]["device"]
    other = config('rollout.launch="eval"', "rollout.check_every=8", "rollout.max_batch=16", "run.name=b")
    assert completions_of(run_training(other, report=Quiet())) == completions_of(result)
