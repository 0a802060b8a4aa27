"""A group's prompt computed once gives the gradient that computing it for every row gives."""

import mlx.core as mx
import pytest
from mlx_lm.models import llama, mamba, qwen2, qwen3

import grpo_fn as g
from grpo_fn.learner import can_share
from tests.support.closeness import assert_same_figures, assert_same_gradients

VOCABULARY = 64
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
MODELS = {
    "llama": lambda: llama.Model(llama.ModelArgs(model_type="llama", **SHAPE)),
    "qwen2": lambda: qwen2.Model(qwen2.ModelArgs(model_type="qwen2", **SHAPE)),
    "qwen3": lambda: qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            head_dim=16,
            max_position_embeddings=128,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            **SHAPE,
        )
    ),
}


def rollout_of(lengths: list[int], prompts: tuple[tuple[int, ...], ...], width: int) -> g.Rollout:
    """Random completions of the given lengths."""
    rows = len(lengths)
    tokens_bt = mx.random.randint(1, VOCABULARY, (rows, width), key=mx.random.key(1))
    return g.Rollout(
        prompts=prompts,
        num_generations=rows // len(prompts),
        tokens_bt=tokens_bt,
        lengths_b=mx.array(lengths),
        logp_bt=mx.full((rows, width), -4.0),
        finished_b=mx.array([True] * rows),
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [1000, 40])
def test_sharing_a_prompt_changes_no_gradient(name: str, max_tokens: int) -> None:
    """Prompts of unlike lengths, one token included, rows of one token, a group half left out."""
    mx.random.seed(3)
    policy = g.Policy.from_module(MODELS[name]())
    prompts = ((5, 9, 11, 3, 8, 2, 7), (4,), (6, 6, 1))
    batch = g.make_batch(
        rollout_of([6, 3, 1, 2, 5, 6, 1, 4, 6, 2, 2, 1], prompts, 6),
        mx.random.normal((3, 4), key=mx.random.key(2)) * mx.array([[1, 0, 1, 0], [1] * 4, [1] * 4]),
    )
    spec = g.preset("dapo")
    batch = g.drop_inactive(batch, spec)
    assert batch.mask_bt.shape[0] == 10
    grad_step = g.make_grad_step(policy, spec, compile=False)
    state = g.init_state(policy.params, g.adamw(1e-3), key=mx.random.key(0))
    plain, plain_stats = grad_step(state, batch)
    parts = g.split_batch(batch, max_tokens=max_tokens, share_prompts=True)
    assert all(part.prompt_index_b is not None for part in parts)
    assert (len(parts) > 1) == (max_tokens < 1000)
    shared, shared_stats = grad_step(state, parts)
    assert shared.accum_weight.item() == plain.accum_weight.item()
    assert_same_figures(shared_stats, plain_stats, ["entropy"])
    assert_same_gradients(shared.accum_grads, plain.accum_grads)


def test_each_prompt_stands_once() -> None:
    """Four completions of one prompt bring it into the batch once."""
    batch = g.make_batch(rollout_of([2, 2, 2, 2], ((7, 8, 9),), 2), mx.ones((1, 4)))
    (part,) = g.split_batch(batch, max_tokens=100, share_prompts=True)
    assert part.tokens_bl.tolist() == [[7, 8, 9]]
    assert part.prompt_index_b is not None and part.prompt_index_b.tolist() == [0, 0, 0, 0]


def test_recurrent_models_cannot_share() -> None:
    """A state-space model has no keys and values to attend to."""
    arguments = mamba.ModelArgs(
        model_type="mamba",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        state_size=4,
        num_hidden_layers=1,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=2,
    )
    assert not can_share(mamba.Model(arguments))
    assert can_share(MODELS["llama"]())


def test_groups_are_needed() -> None:
    """A batch that does not say which rows share a prompt is refused."""
    batch = g.make_batch(rollout_of([1, 1], ((3,),), 1), mx.ones((1, 2)))
    (part,) = g.split_batch(batch, max_tokens=100)
    with pytest.raises(ValueError, match="group_b"):
        g.split_batch(part, max_tokens=100, share_prompts=True)
