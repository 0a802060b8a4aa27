"""The decode loop as a generator: its columns, its early end, and one completion over kept caches."""

import mlx.core as mx
import pytest

import grpo_fn as g
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.rollout import Interrupted, Respond, decode, decode_after
from tests.support.generating import EOS, RAGGED, assert_same, roll
from tests.support.tiny_policies import tiny_policy

SAMPLING = g.Sampling(num_generations=3, max_new_tokens=12, eos_ids=EOS)


def started(policy, prompts=RAGGED, sampling=SAMPLING, **options):
    """A generator of columns with the policy's own parameters."""
    return decode(policy, policy.params, prompts, sampling, key=mx.random.key(0), **options)


def columns_of(steps):
    """The columns of a generator up to its end, and what it returns."""
    found = []
    while True:
        try:
            column = next(steps)
        except StopIteration as end:
            return found, end.value
        if column is not None:
            found.append(column)


def texts_of(columns):
    """The tokens that the columns give to each row, ended ones included."""
    texts = {}
    for column in columns:
        for row, token in zip(column.rows, column.tokens_b.tolist(), strict=True):
            texts.setdefault(row, []).append(token)
    return texts


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_columns_are_the_rollout_s_tokens(name):
    """In parts and all at once; each row's tokens begin with its completion."""
    policy = tiny_policy(name)
    for decoding in (g.Decoding(), g.Decoding(max_batch=3, check_every=1)):
        columns, rollout = columns_of(started(policy, decoding=decoding))
        assert_same(rollout, roll(policy, eos_ids=EOS))
        texts = texts_of(columns)
        for row, completion in enumerate(rollout.completions()):
            assert texts[row][: len(completion)] == completion


@pytest.mark.parametrize("replies", [None, Respond(lambda row, tokens: [7, 8])], ids=["single", "turns"])
@pytest.mark.parametrize("taken", [0, 1, 3, 7])
def test_an_interrupted_rollout_has_what_was_sampled_before(taken, replies):
    """The beginnings of the whole rollout's rows, and the module has its own weights again."""
    policy = tiny_policy()
    options = {"replies": replies, "decoding": g.Decoding(check_every=1, max_batch=3)}
    _, whole = columns_of(started(policy, **options))
    steps, seen = started(policy, **options), 0
    while seen < taken or not seen:
        seen += next(steps) is not None
        if not taken:
            break
    with pytest.raises(StopIteration) as end:
        steps.throw(Interrupted())
    part = end.value.value
    lengths = [len(row) for row in part.completions()]
    assert max(lengths) <= taken and part.tokens_bt.shape[0] == 9
    assert all(a[: len(b)] == b for a, b in zip(whole.completions(), part.completions(), strict=True))
    assert lengths.count(0) >= 6, "the other parts were not begun"
    assert_same(roll(policy, eos_ids=EOS), roll(tiny_policy(), eos_ids=EOS))


def test_a_closed_generator_gives_the_module_back():
    """Without its result: the policy goes on as before."""
    policy = tiny_policy()
    steps = started(policy)
    next(steps)
    steps.close()
    assert_same(roll(policy), roll(tiny_policy()))


def test_a_long_prefill_gives_control_after_each_layer():
    """So that a slow model's prefill can be interrupted; nothing has been sampled then."""
    policy = tiny_policy()
    steps = started(policy, [list(range(3, 40))] * 4)
    layers = len(policy.module.layers)
    assert [next(steps) for _ in range(layers)] == [None] * layers


@pytest.mark.parametrize("options", [{}, {"temperature": 0, "repetition_penalty": 1.4}], ids=str)
def test_one_completion_over_kept_caches_is_that_of_a_rollout(options):
    """With a new cache, with one that holds the beginning, and in two turns that count their draws."""
    policy, prompt = tiny_policy(), RAGGED[0]
    sampling = g.Sampling(max_new_tokens=10, **options)
    want = roll(policy, [RAGGED[1], prompt], generations=1, limit=10, **options).completions()[1]

    def completion(prompt, held, caches, drawn=0, limit=10):
        how = {"key": mx.random.key(0), "number": 1, "caches": caches, "held": held, "drawn": drawn}
        limited = g.Sampling(max_new_tokens=limit, **options)
        columns, _ = columns_of(decode_after(policy, policy.params, prompt, limited, **how))
        return [column.tokens_b.item() for column in columns]

    caches = plain_caches(policy.module)
    assert completion(prompt, 0, caches, limit=4) == want[:4]
    held = caches[0].offset
    assert held == len(prompt) + 3, "the last token was not fed"
    assert completion([*prompt, *want[:4]], held, caches, drawn=4, limit=6) == want[4:]
    assert sampling.max_new_tokens == len(want)
