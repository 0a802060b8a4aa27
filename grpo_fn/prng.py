"""Random keys, which give one independent stream for each (seed, purpose, step, prompt, index).

A key is two 32-bit words. `mx.random.key(s)` is (s >> 32, s mod 2^32), so keys of neighbouring
seeds differ in only a few bits, as do the numbers that are folded into them. Therefore, each key is
hashed before a number is folded in, and again afterwards, so that any difference in seed, purpose,
step, prompt or index gives an independent stream.

Use a key either to derive further keys or to generate numbers, but not for both.
"""

import mlx.core as mx

# The uses of a run's key: the first number folded into it. They begin at 2^31, so that a custom
# loop can fold its step numbers (int32) into the same key.
ROLLOUTS = 2**31  # in training; then the batch step and the round of dynamic sampling
UPDATE_ROUNDING = 2**31 + 1  # of weights and moments to bfloat16; then the number of the update
REFERENCE_ROUNDING = 2**31 + 2  # of the reference when it is mixed; then the number of the update
ADAPTERS = 2**31 + 3  # initial values
GENERATION = 2**31 + 5  # completions of `grpo generate` and `grpo chat`
EVALUATION = 2**31 + 6  # completions of `grpo eval`
CURRICULUM = 2**31 + 7  # prompts sampled by pass rate; then the number sampled before


def fold_in(key: mx.array, *numbers: int | mx.array) -> mx.array:
    """Returns a new PRNG key [2] from a key [2] and numbers, which are folded in one after another.

    Different keys or lists of numbers always result in independent keys, including `mx.random.key`
    of small seeds and small numbers. In `mx.random.split`, by contrast, the i-th key depends on the
    number of keys.

    Args:
        key: uint32 [2].
        numbers: integers or 0-d arrays, from 0 to 2^32 − 1.
    """
    for number in numbers:
        key = fold_in_rows(key[None], mx.array(number, mx.uint32).reshape(1))[0]
    return key


def fold_in_rows(keys_n2: mx.array, data_n: mx.array) -> mx.array:
    """Applies `fold_in` to N keys with one number each: [N,2] uint32 from [N,2] and integers
    [N].
    """
    return _combined(_hashed(keys_n2), data_n)


def completion_keys(key: mx.array, prompts_n: mx.array, generations_n: mx.array) -> mx.array:
    """Returns a key for each completion, [N,2], derived from the prompt's number and the
    completion's number.
    """
    rows = mx.broadcast_to(key[None], (prompts_n.shape[0], 2))
    return fold_in_rows(fold_in_rows(rows, prompts_n), generations_n)


def random_bits(keys_b2: mx.array, first: int | mx.array, count: int, words: int) -> mx.array:
    """Returns random bits, uint32 [N,B,`words`], for samples `first`, `first` + 1, … in rows with
    these keys.

    `first` is one number for all rows, or int32 [B].
    """
    rows = keys_b2.shape[0]
    first_b = mx.broadcast_to(mx.array(first, mx.int32), (rows,))
    numbers = (mx.arange(count)[:, None] + first_b).reshape(-1)
    keys = _combined(mx.tile(_hashed(keys_b2), (count, 1)), numbers, -(-words // 2))
    return keys[:, :words].reshape(count, rows, words)


def _combined(hashed_n2: mx.array, data_n: mx.array, keys: int = 1) -> mx.array:
    low = mx.bitwise_xor(hashed_n2[:, 1], data_n.astype(mx.uint32))
    return _hashed(mx.stack([hashed_n2[:, 0], low], axis=1), keys)


def _hashed(keys_n2: mx.array, keys: int = 1) -> mx.array:
    """Computes Threefry for each key at fixed counters; returns `keys` keys next to each other."""
    return mx.vmap(lambda key: mx.random.split(key, keys).reshape(-1))(keys_n2)
