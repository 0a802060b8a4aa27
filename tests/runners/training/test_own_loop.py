"""A custom loop over grpo_fn computes the same numbers as the command line."""

import pytest

from grpo_fn.backends.cpu import load_blas
from tests.support.processes.new_process import digest_of, in_new_process
from tests.support.tiny_runs import LETTERS, small

needs_blas = pytest.mark.skipif(load_blas().library is None, reason="no BLAS is loaded on this machine")

QUESTION = "Ida has 12 cards. She sells 9. How many are left?"
OWN_LOOP = f"""
import grpo_fn as g

import hashlib
import sys

import mlx.core as mx
import numpy as np
from grpo_fn.trees import named_leaves
from mlx.utils import tree_map
from grpo_fn.prng import ROLLOUTS, fold_in
from mlx_lm import load
from runners.quickstart import MODEL_DIR

model, tokenizer = load(str(MODEL_DIR))
model.update(tree_map(lambda leaf: leaf.astype(mx.float32), model.parameters()))
policy, spec = g.Policy.from_module(model, compute_dtype=mx.float32), g.preset("grpo")
optimizer = g.adamw(1e-3, betas=(0.9, 0.999))
grad_step, update_step = g.make_grad_step(policy, spec), g.make_update_step(optimizer, max_grad_norm=1.0)
state = g.init_state(policy.params, optimizer, key=mx.random.key(3))
chat = [{{"role": "user", "content": "{QUESTION}"}}]
text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
prompt, ends = tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_ids

for step in range(int(sys.argv[1])):
    key = fold_in(state.key, ROLLOUTS, step, 0)
    rollout = g.generate(
        policy, state.old_params, [prompt],
        g.Sampling(num_generations=6, max_new_tokens=8, eos_ids=ends), key=key,
    )
    texts = [tokenizer.decode([n for n in each if n not in ends]) for each in rollout.completions()]
    rewards_pg = mx.array([[float(len(set(text))) for text in texts]])
    batch = g.drop_inactive(g.make_batch(rollout, g.group_advantages(rewards_pg)), spec)
    state, _ = grad_step(state, g.split_batch(batch, max_tokens=10**6))
    state, _ = update_step(state)
    state = g.sync_old(state)

digest = hashlib.sha256()
for name, leaf in sorted(named_leaves(state.params).items()):
    digest.update(name.encode() + np.array(leaf).tobytes())
print(digest.hexdigest())
"""


@needs_blas
def test_a_custom_loop_equals_the_command_line_bit_for_bit(tmp_path):
    """After two steps of the loop, the weights equal grpo-run's; without a BLAS they differ."""
    (tmp_path / "letters.py").write_text(LETTERS)
    row = f'{{"question": "{QUESTION}", "answer": "3"}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 2)  # the second is held out
    config = small(
        run={"output_dir": "out", "seed": 3},
        data={"source": "rows.jsonl", "eval_split": "test", "nudge": ""},
        rollout={
            "num_generations": 6,
            "max_new_tokens": 8,  # none ends before: a run pads shorter ones to shapes that it knows
            "launch": "eval",
            "check_every": 8,
            "max_batch": 6,
        },
        reward={"functions": ["letters.py:letters"]},
        optim={"schedule": "constant", "warmup_ratio": 0.0, "batch_size": 1},
        eval={"samples": 1},
        checkpoint={"every": 1},
        system={"micro_batch_tokens": 10**6, "share_prompts": "never"},
    )
    (tmp_path / "small.toml").write_text(config)
    in_new_process("from runners.cli import main; main(['run', 'small.toml'])", cwd=tmp_path)
    one, two = (digest_of(tmp_path / f"out/small/checkpoint-{n}/model.safetensors") for n in (1, 2))
    assert in_new_process(OWN_LOOP, "2").strip() == two
    assert in_new_process(OWN_LOOP, "1", GRPO_FN_BLAS="none").strip() != one
