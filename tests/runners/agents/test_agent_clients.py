"""Agents that others have written, with only the base URL changed, and openenv's check of what was captured.

GRPO_FN_CLIENTS names a folder with their environments, as for the tests of the wire; a test whose client is
missing is skipped.
"""

import json
import subprocess

import mlx.core as mx
import numpy as np
import pytest

from tests.support.agents import CLIENTS, TALKS, batched, collected
from tests.support.serving import python_with

pytest.importorskip("uvicorn")


@pytest.mark.parametrize(
    ("script", "client", "turns", "earlier"),
    [("agents_sdk", "openai-agents", 3, 1), ("mini_swe", "mini-swe-agent", 2, 1)],
)
def test_an_agent_trains_unchanged(tmp_path, script, client, turns, earlier):
    """All of its calls become rows, whose log-probs are the learner's.

    mini-swe-agent leaves a reply without a command out of the next call, which begins a row.
    """
    program = [str(python_with(client)), str(CLIENTS / f"{script}.py")]
    run, experience = collected(
        tmp_path, "",
        env={"program": program, "timeout": 240.0},
        rollout={"num_generations": 2, "max_new_tokens": 160},
        optim={"batch_size": 1},
    )  # fmt: skip
    assert not any(each.fault for each in experience.played), experience.played
    assert [each.counts["turns"] for each in experience.played] == [turns] * 2
    assert [len(each.earlier) for each in experience.played] == [earlier] * 2
    batch = batched(run, experience)
    logp = run.learner.logprob_step(run.learner.state.params, batch)
    difference = mx.where(batch.mask_bt, mx.abs(logp - batch.rollout_logp_bt), 0.0)
    assert difference.max().item() < 1e-4


def test_openenv_accepts_each_captured_episode(tmp_path):
    """Each row is a turn: prompt, completion, log-probs, and a mask over both."""
    python = python_with("openenv")
    run, experience = collected(tmp_path, TALKS)
    batch = batched(run, experience)
    episodes = [*range(8), *(n for n, each in enumerate(experience.played) for _ in each.earlier)]
    found = {}
    for row, episode in enumerate(episodes):
        length = batch.prompt_lengths_b[row].item()
        mask = np.array(batch.mask_bt[row]).astype(int)
        width = int(mask.nonzero()[0][-1]) + 1
        turn = {
            "prompt_token_ids": batch.tokens_bl[row, :length].tolist(),
            "completion_token_ids": batch.targets_bt[row, :width].tolist(),
            "per_token_logps": batch.rollout_logp_bt[row, :width].tolist(),
            "loss_mask": [0] * length + mask[:width].tolist(),
        }
        found.setdefault(episode, []).append(turn)
    text = json.dumps(list(found.values()))
    command = [python, CLIENTS / "openenv_episode.py"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert done.stdout == "fine\n", done.stdout + done.stderr
