"""Learned positions are found, never exceeded, and refused if there are too few."""

import importlib

import mlx.core as mx
import mlx.nn as nn
import pytest

import grpo_fn as g
from grpo_fn.policy import bound_positions
from grpo_fn.policy_check import completion_logprobs
from grpo_fn.trees import named_leaves
from tests.support.naive_learner import accumulated

POSITIONS = 13
SIZES = dict(
    n_embd=16, n_head=2, n_layer=2, n_ctx=64, layer_norm_epsilon=1e-5, vocab_size=32,
    num_key_value_heads=1, n_inner=32, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
)  # fmt: skip
PROMPTS = [[3] * 9, [4, 5]]
SAMPLING = g.Sampling(num_generations=2, max_new_tokens=5)


def made(name, positions=POSITIONS):
    """A model with this many learned positions; the first ones are the same for every number."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(SIZES | {"model_type": name, "n_positions": positions}))
    table = (model.model if name == "gpt2" else model.transformer).wpe
    table.weight = mx.random.normal((64, 16), key=mx.random.key(2))[:positions]
    return model


def batch_of(policy, prompts=PROMPTS, sampling=SAMPLING):
    """A policy's rollout as a batch."""
    rollout = g.generate(policy, policy.params, prompts, sampling, key=mx.random.key(0))
    return g.make_batch(rollout, mx.array([[1.0, -1.0]] * len(prompts)))


def update(policy, batch):
    """The gradient of a batch, cut as a run does."""
    pieces = g.split_batch(batch, max_tokens=32)
    return named_leaves(accumulated(policy, pieces, compile=True)[0].accum_grads)


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode"])
def test_padding_reads_and_writes_nothing_outside_of_the_table(name):
    """Rows are padded past the table: the update is that of a model with more positions."""
    small, large = (g.Policy.from_module(made(name, positions)) for positions in (POSITIONS, 64))
    assert (small.positions, large.positions) == (POSITIONS, 64)
    batch = batch_of(large)
    assert max(part.tokens_bl.shape[1] for part in g.split_batch(batch, max_tokens=32)) > POSITIONS
    ours, theirs = update(small, batch), update(large, batch)
    for key, leaf in ours.items():
        wanted = theirs[key][: leaf.shape[0]]
        assert mx.allclose(leaf, wanted, rtol=1e-4, atol=1e-6), key
        assert not mx.any(theirs[key][leaf.shape[0] :]), key


def test_more_tokens_than_positions_are_refused():
    """Before anything is computed; the last token needs no position."""
    policy = g.Policy.from_module(made("gpt2"))
    message = "expected at most 13 learned positions, found 14"
    with pytest.raises(ValueError, match=f"a prompt of 10 tokens and max_new_tokens = 5: {message}"):
        g.generate(policy, policy.params, [[3] * 10], SAMPLING, key=mx.random.key(0))
    batch = batch_of(g.Policy.from_module(made("gpt2", 64)), [[3] * 10])
    with pytest.raises(ValueError, match=f"the batch's longest row: {message}"):
        update(policy, batch)
    with pytest.raises(ValueError, match=message):
        g.make_logprob_step(policy)(policy.params, batch)
    with pytest.raises(ValueError, match=message):
        completion_logprobs(policy, policy.params, [3] * 10, [4] * 5)
    assert completion_logprobs(policy, policy.params, [3] * 9, [4] * 4).shape == (4,)


class Shifted(nn.Module):
    """Positions start at the table's third row, as in OPT; the other tables are of tokens."""

    def __init__(self):
        super().__init__()
        self.tokens, self.kinds, self.places = (nn.Embedding(rows, 8) for rows in (32, 5, 12))
        self.head = nn.Linear(8, 32)
        self.layers = []

    def __call__(self, inputs, cache=None):
        """Logits."""
        places = mx.arange(2, 2 + inputs.shape[1])
        return self.head(self.tokens(inputs) + self.kinds(inputs % 5) + self.places(places))


def test_tables_are_found_by_what_is_looked_up():
    """Not by name; adapters and packed tables count too."""
    from mlx_lm.tuner.lora import LoRAEmbedding

    module = Shifted()
    assert bound_positions(module) == bound_positions(module) == 10
    assert mx.array_equal(module.places(mx.array([40])), module.places(mx.array([11])))
    adapted, packed = made("gpt2"), made("gpt2")
    adapted.model.wpe = LoRAEmbedding.from_base(adapted.model.wpe, r=2)
    packed.model.wpe = nn.Embedding(POSITIONS, 32).to_quantized(32, 4)
    packed.model.wte = nn.Embedding(32, 32)
    for model in (adapted, packed):
        assert bound_positions(model) == POSITIONS
        assert mx.array_equal(model.model.wpe(mx.array([40])), model.model.wpe(mx.array([12])))
