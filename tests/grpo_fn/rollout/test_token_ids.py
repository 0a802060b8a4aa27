"""Token ids outside of the model's embedding are refused by name, before MLX reads past the table."""

import attrs
import mlx.core as mx
import mlx.nn as nn
import pytest

import grpo_fn as g
from grpo_fn.checks import check_token_ids
from grpo_fn.learner import halve_batch
from grpo_fn.policy.policy import _embedding_rows
from tests.support.generating import roll
from tests.support.naive_learner import make_state
from tests.support.tiny_policies import ARCHITECTURES, VOCAB, tiny_advantages, tiny_policy, tiny_rollout

OUTSIDE = [VOCAB, 10**8, -1]


def with_token(rollout, token):
    """The rollout with another token in a completion."""
    tokens_bt = mx.array(rollout.tokens_bt)
    tokens_bt[1, 0] = token
    return attrs.evolve(rollout, tokens_bt=tokens_bt)


def batch_of(rollout):
    """A batch with any advantages."""
    return g.make_batch(rollout, tiny_advantages(rollout))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_vocabulary_is_the_embedding_s(name):
    """In every kind of model, with or without weights."""
    policy = tiny_policy(name)
    assert policy.vocabulary == VOCAB == policy.without_weights().vocabulary


class Positions(nn.Module):
    """A model whose table of positions is larger than its table of tokens."""

    def __init__(self, logits):
        """So many logits; 65 tokens."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(65, 8), nn.Embedding(256, 8)
        self.head = nn.Linear(8, logits)

    def __call__(self, tokens_bl, cache=None):
        """Logits."""
        return self.head(self.tokens(tokens_bl) + self.positions(mx.arange(tokens_bl.shape[1])))


def test_other_embeddings():
    """Packed rows count; of two tables, the one with a row per logit, or else the larger; none is unknown."""
    assert _embedding_rows(Positions(65)) == 65 and _embedding_rows(Positions(70)) == 256
    packed = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 96))
    nn.quantize(packed)
    assert _embedding_rows(packed) == 96
    assert _embedding_rows(nn.Linear(4, 4)) is None
    check_token_ids([[10**8]], None)


@pytest.mark.parametrize("token", OUTSIDE)
def test_generate_refuses(token):
    """The message has the prompt's number, the id and the rows; nothing is computed."""
    message = rf"prompt 1 has the token id {token}: expected 0 <= id < {VOCAB}, the rows of the model's"
    with pytest.raises(ValueError, match=message):
        roll(tiny_policy(), [[1, 2], [3, token, 4]])
    assert roll(tiny_policy(), [[0], [VOCAB - 1]]).vocabulary == VOCAB


@pytest.mark.parametrize("token", OUTSIDE)
def test_rollouts_of_one_s_own_are_refused(token):
    """make_batch refuses negative ids, the learner those beyond the embedding."""
    policy, rollout = tiny_policy(), tiny_rollout()
    prompts = (rollout.prompts[0], (3, token))
    for bad in (with_token(rollout, token), attrs.evolve(rollout, prompts=prompts)):
        if token < 0:
            with pytest.raises(ValueError, match="the token id -1: expected 0 <= id"):
                batch_of(bad)
            continue
        batch = batch_of(bad)
        message = rf"token ids up to {token}: expected ids < {VOCAB}, the rows"
        pieces = g.split_batch(batch, max_tokens=30)
        for parts in (batch, pieces, [half for piece in pieces for half in halve_batch(piece)]):
            with pytest.raises(ValueError, match=message):
                g.make_grad_step(policy, g.LossSpec(), compile=False)(make_state(policy), parts)
        with pytest.raises(ValueError, match=message):
            g.make_logprob_step(policy, compile=False)(policy.params, batch)


def test_the_largest_id_costs_no_trace():
    """It differs between batches, and the compiled steps do not see it."""
    policy = tiny_policy()
    state, grad_step = make_state(policy), g.make_grad_step(policy, g.LossSpec())
    rollout = tiny_rollout()
    small = attrs.evolve(rollout, prompts=((1, 2, 3, 4), (5, 6)), tokens_bt=mx.minimum(rollout.tokens_bt, 30))
    for token in (VOCAB - 1, VOCAB - 2):
        batch = batch_of(with_token(small, token))
        assert batch.vocabulary == token + 1
        state, _ = grad_step(state, batch)
    assert grad_step.traces == 1
