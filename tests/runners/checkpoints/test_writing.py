"""Checkpoints and final/: their files, loading with mlx-lm, and pruning."""

import json
import math

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from grpo_fn.trees import named_leaves
from runners.checkpoints.checkpoint import VERSION, prune_checkpoints, write_checkpoint
from runners.checkpoints.run_folder import list_checkpoints
from runners.models.model_writer import save_model
from tests.support.tiny_states import make_state


def test_a_checkpoint_contains_its_files_and_loads_as_a_model(llama, tmp_path):
    """mlx-lm loads the folder with the trained float32 weights."""
    state = make_state(llama)
    folder = write_checkpoint(tmp_path, 40, state, llama, {"em": 0.5, "loss": math.nan})
    assert folder == tmp_path / "checkpoint-40"
    assert {file.name for file in folder.iterdir()} == {
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
        "optimizer.safetensors", "trainer_state.json", "manifest.json",
    }  # fmt: skip
    kept = {"version": VERSION, "step": 40, "em": 0.5, "loss": None, "nonfinite": ["loss"]}
    assert json.loads((folder / "trainer_state.json").read_text()) == kept
    module, tokenizer = mlx_lm.load(str(folder))
    assert all(
        mx.array_equal(named_leaves(module.parameters())[name], leaf)
        for name, leaf in tree_flatten(state.params)
    )
    assert tokenizer.encode("<answer>9") == llama.tokenizer.encode("<answer>9")


def test_final_has_the_dtypes_of_the_source(llama, tmp_path):
    """final/ of a bfloat16 model is bfloat16 again; each trained weight is rounded once."""
    state = make_state(llama)
    final = save_model(tmp_path / "final", state.params, llama)
    module, _ = mlx_lm.load(str(final))
    weights = named_leaves(module.parameters())
    assert {leaf.dtype for leaf in weights.values()} == {mx.bfloat16}
    assert all(
        mx.array_equal(weights[name], leaf.astype(mx.bfloat16)) for name, leaf in tree_flatten(state.params)
    )


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [
        (0, 0, [2, 5, 6, 9, 10, 11, 100]),
        (2, 0, [11, 100]),
        (0, 1, [2, 5, 6, 9, 10, 11, 100]),  # 0 is all, whatever the other says
        (1, 1, [9, 100]),  # the newest stays though it is not the best
        (1, 2, [9, 10, 100]),  # em 0.7 with the higher reward before em 0.7
        (1, 3, [9, 10, 11, 100]),
        (1, 5, [2, 9, 10, 11, 100]),
        (9, 9, [2, 5, 6, 9, 10, 11, 100]),
    ],
)
def test_pruning_keeps_the_newest_and_the_best(tmp_path, keep_last, keep_best, kept):
    """Steps are compared as numbers; em ranks before reward, null last; other folders are not touched."""
    states = {
        2: '{"em": 0.1, "reward": 9.0}',
        5: "{",  # damaged: the first to go
        6: '{"em": "high"}',
        9: '{"em": 0.9, "reward": 1.0}',
        10: '{"em": 0.7, "reward": 2.0}',
        11: '{"em": 0.7, "reward": null}',
        100: '{"em": null, "reward": 3.0}',
    }
    for step, state in states.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "final").mkdir()
    prune_checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best)
    assert [int(folder.name.split("-")[1]) for folder in list_checkpoints(tmp_path)] == kept
    assert (tmp_path / "checkpoint-best").is_dir() and (tmp_path / "final").is_dir()
    assert not list(tmp_path.glob(".*"))
