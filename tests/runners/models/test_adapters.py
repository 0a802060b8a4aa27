"""LoRA, DoRA and full training from end to end, on plain and quantized bases, with a reference."""

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from grpo_fn.trees import arrays_of, named_leaves, nbytes
from runners.config.loading import load_config
from runners.machine.startup import Platform
from runners.models.loaded_model import load_model
from runners.telemetry.report import Quiet
from runners.training.setup import SetUp
from runners.training.train import run_training
from tests.support.tiny_models import make_model_folder
from tests.support.tiny_runs import BY_LETTERS, LETTERS, small, updates_of

CPU = Platform(backend="cpu")
TOKENS = mx.array([[5, 9, 70, 31, 12]])
QUANTIZED = {"group_size": 32, "bits": 4}
CONFIG = small(
    model={"lora": {"rank": 4, "scale": 8.0}},
    rollout={"launch": "eval"},
    reward=BY_LETTERS,
    loss={"beta": 0.05},
    optim={"learning_rate": 5e-3, "max_steps": 2},
    checkpoint={"every": 2},
)


def config_of(folder: Path, tune: str, quantize: dict | None, *more: str):
    """A run's config, and the folder of its random model."""
    base = folder / "model"
    if not base.exists():
        make_model_folder(base, "llama", quantize=quantize)
    (folder / "letters.py").write_text(LETTERS)
    (folder / "train.toml").write_text(CONFIG)
    places = [f"run.output_dir={folder / 'out'}", f"model.path={base}", f"model.tune={tune}"]
    return load_config(str(folder / "train.toml"), [*places, *more]), base


CASES = [("full", None), ("lora", None), ("dora", None), ("lora", QUANTIZED), ("dora", QUANTIZED)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The config, the base's folder and the result of a run, cached for each case."""

    @functools.cache
    def train(tune, packed):
        config, folder = config_of(tmp_path_factory.mktemp(tune), tune, QUANTIZED if packed else None)
        return config, folder, run_training(config, report=Quiet())

    return lambda tune, quantize: train(tune, quantize is not None)


@pytest.mark.parametrize(("tune", "quantize"), CASES)
def test_a_trained_model_opens_in_mlx_lm(trained, tune, quantize):
    """final/ as a model, and the base with its adapters, have the logits of the learner's last state."""
    from mlx_lm import load

    config, folder, result = trained(tune, quantize)
    log = updates_of(result.folder)
    assert all(line["grad_norm"] > 0 for line in log) and log[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert log[-1]["kl"] > 1e-7
    assert all(line["sampling/sampling_logp_difference/max"] < 1e-3 for line in log)
    loaded = load_model(config.model, CPU)
    before = loaded.module(TOKENS)
    loaded.module.update(result.state.params)
    want = loaded.module(TOKENS)
    assert not mx.allclose(want, before, rtol=0, atol=1e-4)
    model, _ = load(str(result.folder / "final"))[:2]
    assert mx.allclose(model(TOKENS), want, rtol=0, atol=2e-3)
    if tune != "full":
        for place in ("final", "checkpoint-2"):
            adapted, _ = load(str(folder), adapter_path=str(result.folder / place))[:2]
            assert mx.allclose(adapted(TOKENS), want, rtol=0, atol=1e-4)
            fitted = json.loads((result.folder / place / "adapter_config.json").read_text())
            assert fitted["fine_tune_type"] == tune and fitted["lora_parameters"]["rank"] == 4


@pytest.mark.parametrize(("tune", "quantize"), CASES[1:])
def test_the_reference_is_the_base_at_no_cost(tmp_path, tune, quantize):
    """All roles share the arrays of the base and the first adapters; the reference equals the base."""
    from mlx_lm import load

    config, folder = config_of(tmp_path, tune, quantize)
    run: Any = SetUp(config.check(), CPU).build()
    learner, state = run.learner, run.learner.state
    for role in (state.ref_params, state.old_params):
        assert [id(a) for a in arrays_of(role)] == [id(a) for a in arrays_of(state.params)]
    held = {id(a) for a in run.loaded.frozen.values()}
    assert {id(a) for a in arrays_of(learner.policy.frozen)} == held
    assert learner.quantized is None and learner.reference is None
    assert nbytes(state.params, state.ref_params, state.old_params) == nbytes(state.params)
    base, _ = load(str(folder))[:2]
    reference = learner.policy.logits(state.ref_params, TOKENS)
    assert mx.allclose(reference, base(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tune", ["lora", "dora"])
def test_a_run_continues_from_existing_adapters(trained, tune):
    """With model.adapters, the folder's settings replace model.lora, and its tensors are initial state and
    reference. mlx-lm opens the adapters in final/."""
    from mlx_lm import load

    _, folder, first = trained(tune, None)
    more = [f"model.adapters={first.folder / 'final'}", "model.lora.rank=2", "run.name=second"]
    second, _ = config_of(folder.parent, tune, None, *more)
    run: Any = SetUp(second.check(), CPU).build()
    saved = named_leaves(first.state.params)
    for role in (run.learner.state.params, run.learner.state.ref_params):
        assert all(mx.array_equal(leaf, saved[name]) for name, leaf in named_leaves(role).items())
    result = run_training(second, report=Quiet())
    log = updates_of(result.folder)
    assert log[0]["kl"] == pytest.approx(0, abs=1e-6) and log[-1]["kl"] > 1e-7
    settings = json.loads((result.folder / "final" / "adapter_config.json").read_text())
    assert settings["lora_parameters"] == {"rank": 4, "scale": 8.0, "dropout": 0.0}
    adapted, _ = load(str(folder), adapter_path=str(result.folder / "final"))[:2]
    model, _ = load(str(result.folder / "final"))[:2]
    assert mx.allclose(adapted(TOKENS), model(TOKENS), rtol=0, atol=2e-3)
