"""Prompts with images in the core: rollout and gradient compared with single rows written out."""

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

import grpo_fn as g
from grpo_fn.images import PromptImages, multimodal_positions
from grpo_fn.learner import halve_batch
from grpo_fn.policy import checkpoint_layers, takes_images, use_multimodal_rope
from grpo_fn.trees import Tree, from_names, named_leaves
from tests.support.closeness import assert_same_gradients
from tests.support.naive_learner import accumulated

SECTIONS = (2, 3, 3)
IMAGE_TOKEN, VOCABULARY, WIDTH, HEADS, KEYS, HEAD = 90, 100, 64, 4, 2, 16
KEPT = ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")  # have adapters


def make_language_part(*, multimodal: bool = True):
    """mlx-lm's module with two layers and adapters."""
    from mlx_lm.models import qwen2_vl
    from mlx_lm.tuner.utils import linear_to_lora_layers

    text = dict(
        model_type="qwen2_vl", vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KEYS, rms_norm_eps=1e-6,
        rope_theta=10000.0, rope_scaling={"type": "mrope", "mrope_section": list(SECTIONS)},
        tie_word_embeddings=False,
    )  # fmt: skip
    module = qwen2_vl.Model(qwen2_vl.ModelArgs.from_dict(text))
    leaves = named_leaves(module.parameters())
    keys = mx.random.split(mx.random.key(3), len(leaves))
    drawn = {
        name: (1.0 if "norm" in name else 0.0) + 0.2 * mx.random.normal(leaf.shape, key=key)
        for (name, leaf), key in zip(leaves.items(), keys, strict=True)
    }
    module.update(from_names(drawn))
    if multimodal:
        use_multimodal_rope(module, SECTIONS)
    module.freeze()
    mx.random.seed(0)  # mlx-lm draws the adapters
    linear_to_lora_layers(module, -1, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": list(KEPT)})
    return module


def drawn_adapters(policy: g.Policy) -> Tree:
    """Adapters that change the output; new ones do not."""
    return tree_map(lambda x: x + 0.1 * mx.random.normal(x.shape, key=mx.random.key(x.size)), policy.params)


def prompt_with(grids: Sequence[tuple[int, int, int]], *, before: int, behind: int, seed: int):
    """A prompt's tokens and images: text, then images with text after each; None without grids."""
    draws = iter(mx.random.randint(1, IMAGE_TOKEN, (200,), key=mx.random.key(seed)).tolist())  # type: ignore
    tokens = [next(draws) for _ in range(before)]
    for grid in grids:
        tokens += [IMAGE_TOKEN] * (grid[0] * grid[1] * grid[2]) + [next(draws) for _ in range(behind)]
    if not grids:
        return tokens, None
    places = tuple(place for place, token in enumerate(tokens) if token == IMAGE_TOKEN)
    features_fd = mx.random.normal((len(places), WIDTH), key=mx.random.key(seed + 1))
    return tokens, PromptImages(features_fd, places, multimodal_positions(tokens, IMAGE_TOKEN, grids))


def naive_logprobs(
    params: Tree, prompt: Sequence[int], completion: Sequence[int], images: PromptImages | None
) -> mx.array:
    """log π [T] of a completion's tokens from one row written out."""
    module = make_language_part(multimodal=False)
    module.update(params)
    model, tokens = module.language_model.model, [*prompt, *completion]
    count = len(tokens)
    positions = [list(range(count))] * 3
    if images is not None:
        following = 1 + max(map(max, images.positions))
        behind = [following + n for n in range(len(completion))]
        positions = [[*row, *behind] for row in images.positions]
    half = HEAD // 2
    axis = [a for a, size in enumerate(SECTIONS) for _ in range(size)]
    angles = mx.array(
        [[positions[axis[f]][place] * 10000.0 ** (-f / half) for f in range(half)] for place in range(count)]
    )

    def turned(x):  # [L,H,D]
        one, other = x[..., :half], x[..., half:]
        cos, sin = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return mx.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    rows = [model.embed_tokens.weight[token] for token in tokens]
    for feature, place in zip(*(images.features_fd, images.places) if images else ((), ()), strict=True):
        rows[place] = feature
    h = mx.stack(rows)
    seen = mx.arange(count)[:, None] >= mx.arange(count)[None]
    for layer in model.layers:
        x, own = layer.input_layernorm(h), layer.self_attn
        q, k, v = (proj(x).reshape(count, -1, HEAD) for proj in (own.q_proj, own.k_proj, own.v_proj))
        q, k = turned(q), turned(k)
        heads = []
        for head in range(HEADS):
            group = head * KEYS // HEADS
            scores = q[:, head] @ k[:, group].T / HEAD**0.5
            heads.append(mx.softmax(mx.where(seen, scores, -1e9), axis=-1) @ v[:, group])
        h = h + own.o_proj(mx.concatenate(heads, axis=-1))
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    logits = module.language_model.lm_head(model.norm(h))[len(prompt) - 1 : -1]
    logp_tv = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(logp_tv, mx.array(list(completion))[:, None], axis=-1)[:, 0]


ENDS = tuple(range(1, 30))  # a third of the vocabulary: completions of many lengths


@pytest.fixture(scope="module")
def policy():
    return g.Policy.from_module(make_language_part())


@pytest.fixture(scope="module")
def params(policy):
    return drawn_adapters(policy)


@pytest.fixture(scope="module")
def prompts():
    """Of different lengths: one image, two images of other sizes, none."""
    return [
        prompt_with([(1, 2, 3)], before=4, behind=3, seed=0),
        prompt_with([(1, 4, 2), (1, 1, 5)], before=2, behind=5, seed=2),
        prompt_with([], before=7, behind=0, seed=4),
    ]


@pytest.fixture(scope="module")
def rollout(policy, params, prompts):
    tokens, images = zip(*prompts, strict=True)
    sampling = g.Sampling(num_generations=3, max_new_tokens=12, eos_ids=ENDS)
    how = {"key": mx.random.key(0), "decoding": g.Decoding(check_every=2, max_batch=6)}
    return g.generate(policy, params, tokens, sampling, images=images, **how)


def test_positions_are_the_paper_s():
    """Text, an image of 2 × 3 cells, text: the figure of sec. 2.1 in small."""
    tokens = [5, 6, 9, 9, 9, 9, 9, 9, 7]
    time, row, column = multimodal_positions(tokens, 9, [(1, 2, 3)])
    assert time == (0, 1, 2, 2, 2, 2, 2, 2, 5)
    assert row == (0, 1, 2, 2, 2, 3, 3, 3, 5)
    assert column == (0, 1, 2, 3, 4, 2, 3, 4, 5)
    made = PromptImages(mx.zeros((6, 4)), tuple(range(2, 8)), (time, row, column))
    assert made.shift == -3  # the next token, number 9, is at position 6


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([1, 9, 9, 2], [(1, 1, 3)], "requires 3 consecutive image tokens"),
        ([1, 9, 9, 2], [], "more image tokens than its 0 images"),
        ([1, 9, 2], [(1, 1, 1), (1, 1, 1)], "fewer than 2 images"),
    ],
)
def test_image_tokens_have_to_be_those_of_the_grids(tokens, grids, message):
    with pytest.raises(ValueError, match=message):
        multimodal_positions(tokens, 9, grids)


def test_rollout_has_the_log_probs_of_each_row_alone(policy, params, prompts, rollout):
    """With different prompts, image sizes and lengths."""
    lengths = [len(tokens) for tokens in rollout.completions()]
    assert len(set(lengths)) > 2
    for row, completion in enumerate(rollout.completions()):
        tokens, images = prompts[row // 3]
        wanted = naive_logprobs(params, tokens, completion, images)
        found = rollout.logp_bt[row, : len(completion)]
        np.testing.assert_allclose(np.array(found), np.array(wanted), atol=2e-5)


@pytest.fixture(scope="module")
def checkpointed():
    module = make_language_part()
    assert checkpoint_layers(module) == 2
    return g.Policy.from_module(module)


@pytest.mark.parametrize("how", ["whole rows", "shared prompts", "checkpointed"])
def test_gradient_is_that_of_rows_one_by_one(policy, params, prompts, rollout, checkpointed, how):
    """Micro-batches, some halved, compared with the sum over rows written out."""
    advantages = mx.random.normal((3, 3), key=mx.random.key(9))
    spec = g.LossSpec(aggregation="token_mean")
    batch, share = g.make_batch(rollout, advantages), how == "shared prompts"
    learner = checkpointed if how == "checkpointed" else policy
    pieces = g.split_batch(batch, max_tokens=90, share_prompts=share)
    assert len(pieces) > 1
    pieces = [half for piece in pieces for half in halve_batch(piece)]
    if share:
        assert any(piece.prompt_index_b is not None for piece in pieces)
    state, _ = accumulated(learner, pieces, spec, params=params, compile=how == "checkpointed")

    def summed(params):
        total = mx.array(0.0)
        for row, completion in enumerate(rollout.completions()):
            tokens, images = prompts[row // 3]
            logp = naive_logprobs(params, tokens, completion, images)
            ratio = mx.exp(logp - mx.stop_gradient(logp))
            total = total - (ratio * advantages.reshape(-1)[row]).sum()
        return total

    assert_same_gradients(state.accum_grads, mx.grad(summed)(params))
    assert state.accum_weight.item() == sum(map(len, rollout.completions()))


def test_the_learner_s_log_probs_are_the_sampler_s(policy, params, rollout):
    """Also for selected rows."""
    batch = g.make_batch(rollout, mx.ones((3, 3)))
    step = g.make_logprob_step(policy, compile=False)
    for part in (batch, *g.split_batch(g.minibatches(batch, 3)[1], max_tokens=10_000)):
        found, wanted, mask = map(np.array, (step(params, part), part.rollout_logp_bt, part.mask_bt))
        np.testing.assert_allclose(found[mask], wanted[mask], atol=2e-5)


def test_selected_and_joined_rollouts_keep_their_images(rollout):
    """Dynamic sampling selects groups and joins rounds."""
    back = g.take_groups(rollout, [2, 0])
    assert back.images == (None, rollout.images[0])
    assert g.make_batch(back, mx.ones((2, 3))).images is not None
    assert g.make_batch(g.take_groups(rollout, [2]), mx.ones((1, 3))).images is None  # of a prompt of text
    whole = g.join_rollouts([back, g.take_groups(rollout, [1])])
    assert whole.images == (None, rollout.images[0], rollout.images[1])
    text = attrs.evolve(back, images=None)
    assert g.join_rollouts([text, text]).images is None
    assert g.join_rollouts([text, back]).images == (None, None, None, rollout.images[0])


def test_text_is_bit_for_bit_what_it_was(prompts):
    """On text, a multimodal model gives the same bits as without rows and columns."""
    tokens = [tokens for tokens, _ in prompts]
    drawn = []
    for multimodal in (False, True):
        policy = g.Policy.from_module(make_language_part(multimodal=multimodal))
        assert takes_images(policy.module) == multimodal
        sampling, images = g.Sampling(num_generations=2, max_new_tokens=6), [None] * 3 if multimodal else None
        how = {"key": mx.random.key(0), "images": images}
        drawn.append(g.generate(policy, drawn_adapters(policy), tokens, sampling, **how))
    assert mx.array_equal(drawn[0].tokens_bt, drawn[1].tokens_bt)
    assert mx.array_equal(drawn[0].logp_bt, drawn[1].logp_bt)
    assert drawn[1].images is None


def test_what_does_not_fit_is_refused(policy, params, prompts):
    """Each with what was found and what is wanted."""
    tokens, images = prompts[0]
    how = {"sampling": g.Sampling(max_new_tokens=2), "key": mx.random.key(0)}
    with pytest.raises(ValueError, match="images: expected 1, one per prompt, found 2"):
        g.generate(policy, params, [tokens], images=[images, None], **how)
    with pytest.raises(ValueError, match="prompt 0 has 5 tokens: its images have"):
        g.generate(policy, params, [tokens[:5]], images=[images], **how)
    blind = g.Policy.from_module(make_language_part(multimodal=False))
    with pytest.raises(ValueError, match="this policy does not accept images"):
        g.generate(blind, blind.params, [tokens], images=[images], **how)
    with pytest.raises(ValueError, match=r"features_fd has shape \(2, 4\)"):
        PromptImages(mx.zeros((2, 4)), (1,), ((0, 1), (0, 1), (0, 1)))
    with pytest.raises(ValueError, match="three of the same length"):
        PromptImages(mx.zeros((1, 4)), (1,), ((0, 1), (0, 1), (0,)))
    with pytest.raises(ValueError, match="add up to 8"):
        use_multimodal_rope(make_language_part(multimodal=False), (2, 2, 2))
