"""Backends only add speed: without its folder, the core computes the same."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import grpo_fn as g
from tests.support.processes.new_process import in_new_process

STEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
import grpo_fn as g
import mlx.core as mx
from mlx_lm.models.llama import Model, ModelArgs

sizes = dict(hidden_size=16, num_hidden_layers=1, intermediate_size=32, num_attention_heads=2)
args = ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=20, num_key_value_heads=1, **sizes)
mx.random.seed(0)
policy = g.Policy.from_module(Model(args))
sampling = g.Sampling(num_generations=2, max_new_tokens=4)
rollout = g.generate(policy, policy.params, [[1, 2, 3]], sampling, key=mx.random.key(1))
batch = g.make_batch(rollout, mx.array([[1.0, -1.0]]))
state = g.init_state(policy.params, g.adamw(1e-2), key=mx.random.key(2))
state, stats = g.make_grad_step(policy, g.preset("grpo", beta=0.0))(state, batch)
state, update = g.make_update_step(g.adamw(1e-2))(state)
assert g.__file__.startswith(sys.argv[1])
print(json.dumps([rollout.tokens_bt.tolist(), stats.entropy.item(), update.grad_norm.item()]))
"""


@pytest.mark.parametrize("deleted", ["cpu", "cuda"])
def test_a_step_is_the_same_without_a_backends_folder(deleted, tmp_path):
    whole = Path(g.__file__).parent
    shutil.copytree(whole, tmp_path / "grpo_fn", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "grpo_fn" / "backends" / deleted)
    found, expected = (
        json.loads(in_new_process(STEP, str(folder)).splitlines()[-1]) for folder in (tmp_path, whole.parent)
    )
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-4)
