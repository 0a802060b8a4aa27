"""Computes the gated delta rule over whole sequences, one chunk of tokens at a time, with a
gradient.

    S_t = S_{t−1}·Diag(g_t) + β_t (v_t − S_{t−1}·Diag(g_t)·k_t) k_tᵀ        y_t = S_t q_t

("Gated Delta Networks", arXiv 2412.06464, eq. 10; with one g per channel, the rule is Kimi Delta
Attention, arXiv 2510.26692.)

mlx-lm computes token by token, and its backward pass stores a few states [Dv,Dk] for each head and
token. In a chunk that starts from S, with G_{ti} = Π_{i<j≤t} g_j, token t writes u_t k_tᵀ:

    u_t = β_t (v_t − S·Diag(G_{t0})·k_t − Σ_{i<t} u_i k_iᵀ·Diag(G_{ti})·k_t)
    so (I + A) U = β(V − K'Sᵀ)

which requires one triangular inverse (the UT transform of arXiv 2406.06484, eq. 10) and matrix
products. Only S is passed between chunks. Decays are computed as sums of logarithms over i < j ≤ t,
never as differences of two long sums.
"""

from typing import cast

import mlx.core as mx
import mlx.nn as nn

from grpo_fn.backends import enabled, number

CHUNK = 32  # tokens; a power of two
CHANNEL_CHUNK = 16  # tokens with per-channel decays, which are [C,C,Dk] in a chunk


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Replaces mlx-lm's function of the same name, and computes in chunks where mlx-lm loops over
    tokens.

    mlx-lm's function is still used for one token, and for inputs of its Metal kernel. The Metal
    kernel has no gradient; a layer requests the kernel with `use_kernel` only outside training.
    """
    # inputs that the kernel supports
    kernel = use_kernel and number("metal_kernels") and q.shape[-1] % 32 == 0
    if q.shape[1] == 1 or kernel or not enabled("chunked_gated_delta"):
        from mlx_lm.models import gated_delta

        return gated_delta.gated_delta_update(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state,
            mask,
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = 2 * beta
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        log_g = -rate * nn.softplus(a + dt_bias)
    else:
        log_g = lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
    return chunked_gated_delta(q, k, v, log_g, beta, state, mask)


def chunked_gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    chunk: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Computes the gated delta rule over T tokens: outputs and the final state, both differentiable
    with respect to all floating inputs.

    Args:
        q: queries [B,T,Hk,Dk]; each head of queries and keys is used by Hv / Hk value heads.
            Nothing is scaled here.
        k: keys [B,T,Hk,Dk].
        v: values [B,T,Hv,Dv].
        log_g: ln of the decay, ≤ 0: [B,T,Hv], or [B,T,Hv,Dk] for one per channel.
        beta: the share of the difference that is written, [B,T,Hv].
        state: [B,Hv,Dv,Dk], the state before the first token; None means zeros.
        mask: [B,T], False where there is no token: the state does not change, and the output is 0.
        chunk: number of tokens per chunk, a power of two; None means `CHUNK` or `CHANNEL_CHUNK`, or
            less for short sequences.

    Returns:
        (y [B,T,Hv,Dv] in q's dtype, state [B,Hv,Dv,Dk] in the given state's dtype, or in float32 if
        none was given). All arithmetic is in float32.
    """
    rows, length, key_heads, key_width = q.shape
    heads, value_width = v.shape[2:]
    if chunk is None:
        longest = CHANNEL_CHUNK if log_g.ndim == 4 else CHUNK
        chunk = min(longest, 1 << (length - 1).bit_length())
    group = heads // key_heads
    arrays = [x.astype(mx.float32) for x in (q, k, v, log_g, beta)]
    if mask is not None:
        arrays = [mx.where(mask.reshape(rows, length, *[1] * (x.ndim - 2)), x, 0) for x in arrays]

    def in_chunks(x: mx.array, split: int) -> mx.array:
        """Converts [B,T,H,…] to [N,B,Hk,H/Hk,C,…]; in the tokens that fill the last chunk, k, β and
        ln g are 0.
        """
        missing = -length % chunk
        if missing:
            x = mx.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(rows, -1, chunk, key_heads, split, *x.shape[3:])
        return x.transpose(1, 0, 3, 4, 2, *range(5, x.ndim))

    queries, keys = (in_chunks(x, 1) for x in arrays[:2])  # [N,B,Hk,1,C,Dk]
    # [N,B,Hk,R,C,Dv], […,C(,Dk)], […,C]
    values, logs, betas = (in_chunks(x, group) for x in arrays[2:])
    betas = betas[..., None]

    later = mx.tril(mx.ones((chunk, chunk), mx.bool_), -1)
    key_products, query_products, from_start, to_end = _decayed_products(queries, keys, logs, later)
    attends = mx.where(later | mx.eye(chunk, dtype=mx.bool_), query_products, 0)
    inverse = cast(mx.array, _inverse_with_ones(mx.where(later, betas * key_products, 0)))
    added = inverse @ (betas * values)  # U where the chunk starts from zeros
    reads = mx.concatenate([inverse @ (betas * from_start * keys), from_start * queries], axis=-2)
    keys_out = mx.broadcast_to(to_end * keys, (*to_end.shape[:-1], key_width))

    if state is None:
        now = mx.zeros((rows, key_heads, group, value_width, key_width))
    else:
        now = state.astype(mx.float32).reshape(rows, key_heads, group, value_width, key_width)
    written = []  # u of each token
    read = []  # what its query finds of its chunk's first state
    # mx.split, because the gradient of an index would be an array of zeros as large as the whole
    # for each chunk.
    parts = [mx.split(x, added.shape[0]) for x in (added, reads, keys_out, from_start[..., -1:, :])]
    for added_c, reads_c, keys_c, decay_c in zip(*parts, strict=True):
        from_state = reads_c[0] @ now.swapaxes(-1, -2)
        new = added_c[0] - from_state[..., :chunk, :]
        now = decay_c[0] * now + new.swapaxes(-1, -2) @ keys_c[0]
        written.append(new)
        read.append(from_state[..., chunk:, :])
    out = mx.stack(read) + attends @ mx.stack(written)  # [N,B,Hk,R,C,Dv]
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, value_width)[:, :length]
    final = now.reshape(rows, heads, value_width, key_width)
    return out.astype(q.dtype), final if state is None else final.astype(state.dtype)


def _decayed_products(
    queries: mx.array, keys: mx.array, logs: mx.array, later: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Computes products and decays between the tokens of a chunk.

    Args:
        queries, keys: [...,C,D].
        logs: ln of the decays, [...,C], or [...,C,D] for one a channel.
        later: [C,C], true where the first token comes after the second.

    Returns:
        (products of each key with the keys before it, of each query with the keys up to it:
        [...,C(t),C(i)], decayed from token i to token t; decays from the chunk's start to each
        token, and from each token to the chunk's end: [...,C,D], D = 1 for one a token).
    """
    if logs.ndim == keys.ndim:
        decays = mx.exp(mx.cumsum(mx.where(later[..., None], logs[..., :, None, :], 0), axis=-3))
        from_start = mx.exp(mx.cumsum(logs, axis=-2))
        to_end = decays[..., -1, :, :]
        near = decays * keys[..., None, :, :]
        key_products = (keys[..., :, None, :] * near).sum(axis=-1)
        query_products = (queries[..., :, None, :] * near).sum(axis=-1)
        return key_products, query_products, from_start, to_end
    decays = mx.exp(mx.cumsum(mx.where(later, logs[..., :, None], 0), axis=-2))
    from_start, to_end = mx.exp(mx.cumsum(logs, axis=-1))[..., None], decays[..., -1, :, None]
    keys_t = keys.swapaxes(-1, -2)
    return (keys @ keys_t) * decays, (queries @ keys_t) * decays, from_start, to_end


@mx.custom_function
def _inverse_with_ones(lower: mx.array) -> mx.array:
    """Computes (I + A)⁻¹ for matrices [...,C,C] that are zero on and above the diagonal; C is a
    power of two.

    The blocks on the diagonal are inverted first and then joined in pairs: the inverse of
    [[P,0],[R,Q]] has −Q⁻¹RP⁻¹ as its lower left block. The shorter product (I − A)(I + A²)(I + A⁴)…
    loses all digits if keys repeat.
    """
    size = lower.shape[-1]
    place = mx.arange(size)
    inverse = mx.eye(size) + mx.zeros_like(lower)
    width = 1
    while width < size:
        block = place // width
        below = (block[:, None] % 2 == 1) & (block[:, None] == block[None] + 1)
        corner = mx.where(below, lower, 0)
        inverse = inverse - (corner if width == 1 else inverse @ corner @ inverse)
        width *= 2
    return inverse


@_inverse_with_ones.vjp
def _inverse_with_ones_vjp(lower: mx.array, cotangent: mx.array, inverse: mx.array) -> mx.array:
    """Computes dA = −Xᵀ dX Xᵀ. Entries on and above the diagonal belong to constants."""
    inverse_t = inverse.swapaxes(-1, -2)
    return cast(mx.array, -(inverse_t @ cotangent @ inverse_t))
