"""A small Qwen2-VL language part with random weights, and its forward written out: one row, no caches."""

from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_map

import grpo_fn as g
from grpo_fn.images import PromptImages, multimodal_positions
from grpo_fn.policy import use_multimodal_rope
from grpo_fn.trees import Tree, from_names, named_leaves

SECTIONS = (2, 3, 3)
IMAGE_TOKEN, VOCABULARY, WIDTH, HEADS, KEYS, HEAD = 90, 100, 64, 4, 2, 16
SCALE, KEPT = 2.0, ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")  # of the adapters


def make_language_part(*, multimodal: bool = True):
    """mlx-lm's module with adapters, two layers."""
    from mlx_lm.models import qwen2_vl
    from mlx_lm.tuner.utils import linear_to_lora_layers

    text = {
        "model_type": "qwen2_vl",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(SECTIONS)},
        "tie_word_embeddings": False,
    }
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
    settings = {"rank": 4, "scale": SCALE, "dropout": 0.0, "keys": list(KEPT)}
    linear_to_lora_layers(module, -1, settings)
    return module


def drawn_adapters(policy: g.Policy) -> Tree:
    """Adapters that change something: new ones do not."""
    return tree_map(lambda x: x + 0.1 * mx.random.normal(x.shape, key=mx.random.key(x.size)), policy.params)


def prompt_with(grids: Sequence[tuple[int, int, int]], *, before: int, behind: int, seed: int):
    """A prompt's tokens and images: text, an image and text in turn. (tokens, None) without grids."""
    draws = iter(mx.random.randint(1, IMAGE_TOKEN, (200,), key=mx.random.key(seed)).tolist())  # type: ignore
    tokens = [next(draws) for _ in range(before)]
    for grid in grids:
        tokens += [IMAGE_TOKEN] * (grid[0] * grid[1] * grid[2]) + [next(draws) for _ in range(behind)]
    if not grids:
        return tokens, None
    places = tuple(place for place, token in enumerate(tokens) if token == IMAGE_TOKEN)
    features_fd = mx.random.normal((len(places), WIDTH), key=mx.random.key(seed + 1))
    return tokens, PromptImages(features_fd, places, multimodal_positions(tokens, IMAGE_TOKEN, grids))


def naive_logits(
    params: Tree, frozen: Tree, tokens: Sequence[int], images: PromptImages | None, prompt: int
) -> mx.array:
    """Logits [L,V] of one row, whose first `prompt` tokens are its prompt."""
    leaves = {name.removeprefix("language_model."): x for name, x in named_leaves(frozen).items()}
    adapters = {name.removeprefix("language_model."): x for name, x in named_leaves(params).items()}
    count = len(tokens)

    def linear(x, name):
        base = f"{name}.linear" if f"{name}.linear.weight" in leaves else name
        y = x @ leaves[f"{base}.weight"].T
        if f"{base}.bias" in leaves:
            y = y + leaves[f"{base}.bias"]
        if base != name:
            y = y + SCALE * (x @ adapters[f"{name}.lora_a"]) @ adapters[f"{name}.lora_b"]
        return y

    def norm(x, name):
        return x / mx.sqrt(mx.square(x).mean(-1, keepdims=True) + 1e-6) * leaves[f"{name}.weight"]

    positions = [list(range(count))] * 3
    if images is not None:
        following = 1 + max(map(max, images.positions))
        behind = [following + n for n in range(count - prompt)]
        positions = [[*row, *behind] for row in images.positions]
    axis = [a for a, size in enumerate(SECTIONS) for _ in range(size)]
    angles = mx.array(
        [
            [positions[axis[f]][place] * 10000.0 ** (-f / (HEAD // 2)) for f in range(HEAD // 2)]
            for place in range(count)
        ]
    )

    def turned(x):  # [L,H,D]
        one, other = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        cos, sin = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        return mx.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    rows = [leaves["model.embed_tokens.weight"][token] for token in tokens]
    for feature, place in zip(*(images.features_fd, images.places) if images else ((), ()), strict=True):
        rows[place] = feature
    h = mx.stack(rows)
    seen = mx.arange(count)[:, None] >= mx.arange(count)[None]
    for layer in ("model.layers.0", "model.layers.1"):
        x = norm(h, f"{layer}.input_layernorm")
        q, k, v = (linear(x, f"{layer}.self_attn.{n}_proj").reshape(count, -1, HEAD) for n in "qkv")
        q, k = turned(q), turned(k)
        heads = []
        for head in range(HEADS):
            group = head * KEYS // HEADS
            scores = q[:, head] @ k[:, group].T / HEAD**0.5
            heads.append(mx.softmax(mx.where(seen, scores, -1e9), axis=-1) @ v[:, group])
        h = h + linear(mx.concatenate(heads, axis=-1), f"{layer}.self_attn.o_proj")
        x = norm(h, f"{layer}.post_attention_layernorm")
        gate = linear(x, f"{layer}.mlp.gate_proj")
        h = h + linear(gate * mx.sigmoid(gate) * linear(x, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return linear(norm(h, "model.norm"), "lm_head")


def naive_logprobs(
    params: Tree, frozen: Tree, prompt: Sequence[int], completion: Sequence[int], images: PromptImages | None
) -> mx.array:
    """log π [T] of a completion's tokens."""
    logits = naive_logits(params, frozen, [*prompt, *completion], images, len(prompt))[len(prompt) - 1 : -1]
    logp_tv = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return mx.take_along_axis(logp_tv, mx.array(list(completion))[:, None], axis=-1)[:, 0]
