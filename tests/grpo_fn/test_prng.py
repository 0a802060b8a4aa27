"""Random streams: different names never share a key, and equal names always do."""

import itertools

import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn import prng
from grpo_fn.prng import fold_in, fold_in_rows, random_bits

PURPOSES = [value for name, value in vars(prng).items() if name.isupper()]
SEEDS = [*range(64), 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]


def tuples(keys_n2):
    """Keys as hashable values."""
    return {tuple(key) for key in np.array(keys_n2).tolist()}


def folded(keys_n2, numbers):
    """Each key with each number: [N·M,2]."""
    count = len(numbers)
    data = mx.tile(mx.array(list(numbers), mx.uint32), (keys_n2.shape[0],))
    return fold_in_rows(mx.repeat(keys_n2, count, axis=0), data)


def test_purposes_differ_and_leave_steps_alone():
    """Each purpose has its own number above every step that a custom loop may use."""
    assert len(set(PURPOSES)) == len(PURPOSES) >= 6
    assert min(PURPOSES) > np.iinfo(np.int32).max and max(PURPOSES) < 2**32


def test_no_two_names_share_a_key():
    """200,000 combinations of seeds, purposes, steps, prompts and completions."""
    keys = mx.stack([mx.random.key(seed) for seed in SEEDS])
    levels = [PURPOSES, [0, 1, 2, 3, 4, 7, 8, 999, 2**31 - 1], [0, 1, 2, 3, 8, 511], [0, 1, 2, 3, 4, 5, 6, 7]]
    seen, total = tuples(keys), len(SEEDS)
    for numbers in levels:
        keys = folded(keys, numbers)
        seen |= tuples(keys)
        total += keys.shape[0]
    assert len(seen) == total > 200_000


def test_all_levels_are_told_apart():
    """The order of a name's numbers matters, and so does their count."""
    key = mx.random.key(7)
    names = [name for length in range(1, 5) for name in itertools.product((0, 1, 2), repeat=length)]
    assert len(tuples(mx.stack([fold_in(key, *name) for name in names]))) == len(names)
    assert len(tuples(mx.stack([mx.random.key(0), fold_in(mx.random.key(0), 0)]))) == 2


def test_keys_of_neighbouring_names_have_nothing_in_common():
    """Each bit is set in half of the keys and differs between half of all neighbours."""
    keys = folded(mx.stack([mx.random.key(seed) for seed in range(64)]), range(64))
    bits = np.unpackbits(np.array(keys).view(np.uint8), axis=-1).reshape(64, 64, 64)
    near = np.arange(64) ^ 1
    error = 0.5 / np.sqrt(64 * 64)
    assert (np.abs(bits.mean(axis=(0, 1)) - 0.5) < 5 * error).all()
    for other in (bits[::-1], bits[:, ::-1], bits[::-1, ::-1], bits[near], bits[:, near]):
        assert (np.abs((bits != other).mean(axis=(0, 1)) - 0.5) < 8 * error).all()


def test_a_row_s_words_depend_on_its_key_and_the_draw_s_number_alone():
    """Other rows and the first number do not matter."""
    keys = mx.random.split(mx.random.key(3), 5)
    words = random_bits(keys, 0, 6, 3)
    assert words.shape == (6, 5, 3) and words.dtype == mx.uint32
    assert mx.array_equal(random_bits(keys[2:4], 4, 2, 3), words[4:, 2:4])
    assert len(tuples(words.reshape(-1, 3))) == 30


def test_keys_are_the_same_compiled():
    """Also with an array as number, as in an update's rounding."""
    key = mx.random.key(3)
    step = g.compiled(lambda key, number: fold_in(key, prng.UPDATE_ROUNDING, number))
    for number in (0, 5):
        want = fold_in(key, prng.UPDATE_ROUNDING, number)
        assert mx.array_equal(step(key, mx.array(number, mx.int32)), want)
    assert step.traces == 1
