"""Training with images from end to end, on tiny random models: needs mlx-vlm; CI does not install it.

The reference is mlx-vlm: its processor, and its forward pass of each row.
"""

import importlib
import json
import shutil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import grpo_fn as g
from grpo_fn.trees import named_leaves
from runners.config.loading import load_config
from runners.engines.engine import Weights
from runners.engines.rollouts import generate, requests_of
from runners.files.tensor_files import load_arrays
from runners.images.tower import prepare_vision
from runners.machine.startup import Platform
from runners.models.model_reader import load_module
from runners.models.model_writer import save_model
from runners.telemetry.report import Quiet
from runners.training.setup import SetUp
from runners.training.train import run_training
from tests.support.commands import grpo
from tests.support.resuming import killed, outcome
from tests.support.tiny_runs import Notes, updates_of
from tests.support.tiny_states import same_bits
from tests.support.vision_models import FAMILIES, IMAGE_TOKEN, needs_mlx_vlm
from tests.support.vision_runs import write_vision_run

CPU = Platform(backend="cpu")
pytestmark = [needs_mlx_vlm, pytest.mark.filterwarnings("ignore")]


def vlm() -> Any:
    """mlx-vlm, which only these tests import."""
    return importlib.import_module("mlx_vlm")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Model, data and config of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    write_vision_run(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def run(folder):
    """A run before its first step."""
    return SetUp(load_config(str(folder / "seeing.toml")).check(), CPU).build()


@pytest.fixture(scope="module")
def finished(folder):
    """The finished run, and its messages."""
    notes = Notes()
    return run_training(load_config(str(folder / "seeing.toml")), report=notes), notes


@pytest.fixture(scope="module")
def theirs(folder):
    """mlx-vlm's own model and processor of the folder."""
    return vlm().load(str(folder / "model"))


def inputs_of(example, processor):
    """mlx-vlm's token ids of an example, and its arguments for the images."""
    images = [str(image.path) for image in example.images] or None
    found = processor(text=[example.text], images=images, add_special_tokens=False)
    return np.array(found["input_ids"])[0].tolist(), {
        name: mx.array(found[name]) for name in ("pixel_values", "image_grid_thw") if name in found
    }


def logprobs(module, prompt, completion, images):
    """log π of a completion, from mlx-vlm's forward pass of this row."""
    module.language_model._rope_deltas = module.language_model._position_ids = None
    logits = module(mx.array([[*prompt, *completion]]), **images).logits[0, len(prompt) - 1 : -1]
    logp_tv = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logp_tv, mx.array(completion)[:, None], axis=-1)[:, 0])


def sampled(run, examples, seed):
    """A rollout of a run with its first weights."""
    engine, sampling = run.learner.engine, run.collector.sampling
    engine.load(Weights(run.learner.sampling, run.learner.state.params, 0))
    key, numbers = mx.random.key(seed), range(len(examples))
    return generate(engine, requests_of(examples, sampling, key, numbers, run.loaded.vision), sampling)


def test_prompts_are_those_of_the_model_s_processor(run, theirs):
    """All tokens are equal, for prompts with no image, one or two images of several sizes."""
    examples = [*run.data.train, *run.data.evaluation]
    assert {len(example.images) for example in examples} == {0, 1, 2}
    for example in examples:
        ids, _ = inputs_of(example, theirs[1])
        assert list(example.tokens) == ids
    assert len({list(example.tokens).count(IMAGE_TOKEN) for example in examples}) > 4


def test_rollout_has_the_log_probs_of_mlx_vlm(run, theirs):
    """In a batch of prompts with images of different sizes, each row equals mlx-vlm's result for that row."""
    module, processor = theirs
    examples = run.data.train[:5]
    rollout = sampled(run, examples, 1)
    # mlx-vlm's forward pass treats every image token as part of an image.
    rows = [(n, each) for n, each in enumerate(rollout.completions()) if IMAGE_TOKEN not in each]
    assert len(rows) > 10
    for row, completion in rows:
        ids, images = inputs_of(examples[row // 3], processor)
        wanted = logprobs(module, ids, completion, images)
        np.testing.assert_allclose(np.array(rollout.logp_bt)[row, : len(completion)], wanted, atol=1e-4)


def test_the_tower_computes_an_image_once(run, monkeypatch):
    """Completions, gradients and later rollouts of the same prompt use the cached features."""
    vision, seen = run.loaded.vision, []
    vision._cache.clear()
    kind, patches = type(vision.processor), type(vision.processor).patches
    monkeypatch.setattr(kind, "patches", lambda self, file: seen.append(file.name) or patches(self, file))
    state, examples = run.learner.state, run.data.train[:2]
    for _ in range(2):
        rollout = sampled(run, examples, 1)
        batch = g.make_batch(rollout, mx.array([[1.0, -1.0, 0.5]] * 2))
        run.learner.grad_step(state, g.split_batch(batch, max_tokens=100))
    assert sorted(seen) == sorted({image.name for example in examples for image in example.images})


def test_a_run_trains_evaluates_and_says_what_it_does(finished, folder):
    """In two updates, weights change, and the log contains the images' names as in the data."""
    result, _ = finished
    assert result.updates == 2 and result.last_em is not None
    rows = [json.loads(line) for line in (result.folder / "completions.jsonl").read_text().splitlines()]
    data = {
        row["question"]: row["image"]
        for row in map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    }
    for row in rows:
        image = data[row["prompt"]]
        wanted = [image] if isinstance(image, str) else image
        assert row.get("images") == wanted
    assert any(row.get("images") for row in rows)
    updates = updates_of(result.folder)
    assert len(updates) == 2 and all(line["grad_norm"] > 0 for line in updates)
    assert all(abs(line["sampling/sampling_logp_difference/mean"]) < 1e-4 for line in updates)


REUSE = {"max_steps": 4, "num_iterations": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("name", "optim", "what", "count"),
    [("once", {"max_steps": 3}, "sampling", 3), ("reused", REUSE, "step", 2)],
    ids=["between two steps", "between updates of rollouts that wait"],
)
def test_a_resumed_vision_run_is_bit_identical(folder, name, optim, what, count):
    """An interrupted and resumed run has the state, log, completions and model of an uninterrupted one."""
    ends = []
    for kind in ("straight", "cut"):
        place = {"name": f"{name}-{kind}", "output_dir": str(folder / f"{name}-{kind}")}
        path = write_vision_run(folder, run=place, optim=optim, eval={"at_start": False})
        config = load_config(str(path))
        if kind == "cut":
            killed(config, what, count)
        ends.append(run_training(config, report=Quiet(), resume=kind == "cut"))
    straight, resumed = ends
    assert same_bits(resumed.state, straight.state)
    assert outcome(resumed.folder) == outcome(straight.folder)


def test_final_is_a_model_of_mlx_vlm(finished, folder, run):
    """mlx-vlm's own `load` of final/ gives the trained policy's log-probs; the tower's weights stay."""
    result, _ = finished
    module, processor = vlm().load(str(result.folder / "final"))
    example = next(example for example in run.data.train if len(example.images) == 2)
    ids, images = inputs_of(example, processor)
    vision = run.loaded.vision.see([example])
    rollout = g.generate(
        run.learner.policy,
        result.state.params,
        [example.tokens],
        g.Sampling(num_generations=2, max_new_tokens=6),
        key=mx.random.key(2),
        images=vision,
    )
    untrained = sampled(run, [example], 2)
    for row, completion in enumerate(rollout.completions()):
        wanted = logprobs(module, ids, completion, images)
        np.testing.assert_allclose(np.array(rollout.logp_bt)[row, : len(completion)], wanted, atol=1e-4)
    assert not mx.array_equal(rollout.logp_bt[:, 0], untrained.logp_bt[:2, 0])  # training changed something
    before, _ = load_arrays(folder / "model" / "model.safetensors")
    after, _ = load_arrays(result.folder / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[key], after[key]) for key in before if key.startswith("vision_tower"))
    from mlx_lm.utils import load_model as mlx_lm_load

    assert mlx_lm_load(result.folder / "final")  # passes over the tower


def test_eval_measures_what_training_does(finished, folder):
    """`grpo eval` of a run: greedy exact match on the same prompts, with the images in each row."""
    result, _ = finished
    out = folder / "rows.jsonl"
    arguments = ["eval", str(result.folder), str(folder / "model"), "--out", str(out)]
    grpo(*arguments, "--config", folder / "seeing.toml")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    logged = (result.folder / "evaluations.jsonl").read_text().splitlines()
    after = [row for row in map(json.loads, logged) if row["update"] == 2]
    assert [row["images"] for row in rows] == [row["images"] for row in after] * 2
    mine = [row["completion"] for row in rows[: len(after)]]
    assert mine == [row["completion"] for row in after]


def test_a_folder_of_transformers_is_the_same_model(folder, run, tmp_path):
    """Other names, PyTorch's layout of the first layer, the text part's keys in a table of their own.

    mlx-vlm does not read such a folder, but what is saved of it.
    """
    source = folder / "model"
    other = tmp_path / "model"
    shutil.copytree(source, other)
    weights, _ = load_arrays(source / "model.safetensors")
    patches = "vision_tower.patch_embed.proj.weight"
    weights[patches] = mx.contiguous(weights[patches].transpose(0, 4, 1, 2, 3))
    renamed = {
        name.replace("vision_tower.", "model.visual.")
        .replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head", "lm_head"): leaf
        for name, leaf in weights.items()
    }
    mx.save_safetensors(str(other / "model.safetensors"), renamed, metadata={"format": "pt"})
    stated = json.loads((source / "config.json").read_text())
    outside = [name for name in stated if "_token_id" in name or name == "vision_config"]
    outer = {name: stated.pop(name) for name in outside}
    scaling = stated.pop("rope_scaling")
    theta = {"rope_theta": stated.pop("rope_theta"), "rope_type": "default"}
    text = {**stated, "rope_parameters": {**theta, "mrope_section": scaling["mrope_section"]}}
    whole = {"model_type": stated["model_type"], **outer, "text_config": text}
    (other / "config.json").write_text(json.dumps(whole))
    config = load_config(str(write_vision_run(folder, run={"name": "renamed"})), [f"model.path={other}"])
    found: Any = SetUp(config.check(), CPU).build()
    examples = run.data.train[:3]
    both = [sampled(each, examples, 1) for each in (run, found)]
    assert mx.array_equal(both[0].tokens_bt, both[1].tokens_bt)
    assert mx.array_equal(both[0].logp_bt, both[1].logp_bt)
    final = save_model(tmp_path / "final", found.learner.state.params, found.loaded)
    module, processor = vlm().load(str(final))
    ids, images = inputs_of(examples[0], processor)
    completion = both[0].completions()[0]
    wanted = logprobs(module, ids, completion, images)
    np.testing.assert_allclose(np.array(both[0].logp_bt)[0, : len(completion)], wanted, atol=1e-4)
    again: Any = prepare_vision(load_module(final, False)[0], final, mx.float32)
    (seen, *_), (before, *_) = again.see(examples), run.loaded.vision.see(examples)
    assert mx.array_equal(seen.features_fd, before.features_fd)


def test_the_plan_counts_the_tower(folder, run):
    """Each phase contains the bytes of its weights."""
    seeing, blind = (
        json.loads(grpo("plan", folder / "seeing.toml", "--json", *more).stdout)["phases"].values()
        for more in ([], ["--set", "data.image="])
    )
    held = sum(leaf.nbytes for leaf in named_leaves(run.loaded.vision.module.parameters()).values())
    weights = ([phase["parts"]["weights"] for phase in phases] for phases in (seeing, blind))
    assert {with_it - without for with_it, without in zip(*weights, strict=True)} == {held}


def test_the_processor_s_template_is_used(folder, run, tmp_path):
    """chat_template.json is used if the tokenizer's template does not render images or is missing."""
    for name, own in (("other", "{{ messages[0]['content'] }}"), ("missing", None)):
        model = tmp_path / name
        shutil.copytree(folder / "model", model)
        settings = json.loads((model / "tokenizer_config.json").read_text())
        whole = {"chat_template": settings.pop("chat_template").replace("assistant", "painter")}
        (model / "chat_template.json").write_text(json.dumps(whole))
        settings |= {"chat_template": own} if own else {}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        config = load_config(str(folder / "seeing.toml"), [f"model.path={model}"])
        found = SetUp(config.check(), CPU).build()
        processor = vlm().utils.load_processor(model)
        for example, before in zip(found.data.train, run.data.train, strict=True):
            assert list(example.tokens) == inputs_of(example, processor)[0]
            assert example.text.endswith("painter\n") and example.tokens != before.tokens
