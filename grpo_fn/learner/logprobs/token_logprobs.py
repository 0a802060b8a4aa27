"""Computes log-probabilities for given tokens, and the KL to a teacher, without keeping all logits
in memory.

The logits of N positions × V tokens are the largest arrays of the learner. Here, logits are
computed for a chunk of positions at a time, and again in the backward pass, with the gradient in
closed form:

    z = head(hidden) / temperature
    log p_t = z_t − lse(z)          ∂/∂z_j = 1[j = t] − p_j
    H = lse(z) − Σ_j p_j z_j        ∂/∂z_j = −p_j (log p_j + H)
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from grpo_fn.backends import enabled, find, number
from grpo_fn.backends.composed import LEAST_LOG, exp, softmax_sums
from grpo_fn.checks import check_rank, check_shape
from grpo_fn.policy.head import Head, linear_head
from grpo_fn.trees import Tree, arrays_of, map_arrays


def chunk_rows(vocabulary: int) -> int:
    """Returns the default number of positions per chunk.

    On a CPU, a chunk has 96 positions, or fewer if their logits exceed 16 MB, or more if their
    logits need less than 1 MB. On a GPU, a chunk has as many positions as fit in 128 MB (Metal) or
    512 MB (CUDA) of logits.
    """
    if not enabled("logit_chunks"):
        return 2**31 - 1
    most = min(number("logits") // vocabulary, number("logit_rows"))
    return max(most, number("least_logits") // vocabulary, 1)


def token_logprobs(
    hidden_btd: mx.array,
    head: mx.array | Head,
    targets_bt: mx.array,
    *,
    temperature: float | mx.array = 1.0,
    chunk: int | None = None,
) -> mx.array:
    """Computes log softmax(head(hidden)/temperature) at the target tokens.

    Args:
        hidden_btd: final hidden states [B,T,D], any floating dtype.
        head: the [V,D] matrix of a plain linear head, or a Head.
        targets_bt: token ids [B,T], integers.
        temperature: divides the logits; > 0.
        chunk: positions per chunk; for None, see `chunk_rows`.

    Returns:
        logp_bt, float32, nats. Gradients flow to `hidden_btd` and the head's parameters.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    return _apply(hidden_btd, head, targets_bt, temperature, chunk, None)[0]


def token_logprobs_and_entropy(
    hidden_btd: mx.array,
    head: mx.array | Head,
    targets_bt: mx.array,
    *,
    temperature: float | mx.array = 1.0,
    chunk: int | None = None,
    entropy_gradient: bool = True,
) -> tuple[mx.array, mx.array]:
    """Like `token_logprobs`, but also returns the entropy of the full distribution at each
    position: (logp_bt, entropy_bt).

    Both arrays are float32, in nats, at the given temperature. With `entropy_gradient=False`, the
    entropy is treated as a constant, which saves two passes over the logits.
    """
    entropy = "differentiable" if entropy_gradient else "constant"
    logp_bt, entropy_bt = _apply(hidden_btd, head, targets_bt, temperature, chunk, entropy)
    return logp_bt, entropy_bt if entropy_gradient else mx.stop_gradient(entropy_bt)


def _apply(
    hidden_btd: mx.array,
    head: mx.array | Head,
    targets_bt: mx.array,
    temperature: float | mx.array,
    chunk: int | None,
    entropy: str | None,
) -> list[mx.array]:
    check_rank("hidden_btd", hidden_btd, 3)
    batch, length, width = hidden_btd.shape
    check_shape("targets_bt", targets_bt, (batch, length))
    if not mx.issubdtype(targets_bt.dtype, mx.integer):
        raise ValueError(f"targets_bt has dtype {targets_bt.dtype}, expected integers (token ids)")
    if isinstance(head, mx.array):
        check_rank("head", head, 2)
        check_shape("head", head, (head.shape[0], width))
        head = linear_head(head)
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(
            f"temperature = {temperature}: expected > 0 (greedy choice has no distribution)"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected at least 1 position")
    if batch * length == 0:
        return [mx.zeros((batch, length)) for _ in range(1 if entropy is None else 2)]
    if chunk is None:
        # lazy: a shape, no work
        vocabulary = head.function(head.params, hidden_btd[:1, 0]).shape[-1]
        chunk = chunk_rows(vocabulary)
    compute = _chunked(head, targets_bt.reshape(-1), temperature, chunk, entropy)
    columns = compute(hidden_btd.reshape(-1, width), head.params)
    return [column.reshape(batch, length) for column in columns[:-1]]


def _chunked(
    head: Head, targets_n: mx.array, temperature: float | mx.array, chunk: int, entropy: str | None
) -> Callable[..., Any]:
    """Creates a custom function (hidden_nd, head params) -> [logp_n, lse_n] or [logp_n, entropy_n,
    lse_n].
    """

    def divided(x: mx.array) -> mx.array:
        """Divides by the temperature. A temperature of 1 is skipped, because each pass over a
        chunk's logits takes time.
        """
        return x if isinstance(temperature, int | float) and temperature == 1 else x / temperature

    def forward_chunk(params: Tree, h_cd: mx.array, t_c: mx.array) -> list[mx.array]:
        fast = None if head.weight is None else find("row_logprobs", h_cd.dtype)
        if head.weight is not None and fast is not None:
            columns = fast(h_cd @ head.weight(params).T, t_c, (head.scale, head.cap), temperature)
        else:
            z_cv = divided(head.function(params, h_cd).astype(mx.float32))
            sums = softmax_sums(z_cv)
            logp_c = mx.take_along_axis(sums.below, t_c[:, None], axis=-1)[:, 0] - sums.log_total
            columns = logp_c, sums.entropy, sums.top[:, 0] + sums.log_total
        return [column for place, column in enumerate(columns) if place != 1 or entropy is not None]

    def backward_chunk(
        params: Tree, h_cd: mx.array, t_c: mx.array, out: list[mx.array], ct: list[mx.array]
    ) -> tuple[mx.array, Tree]:
        if head.weight is None:
            return autodiff(forward_chunk, params, h_cd, t_c, ct)
        weight_vd = head.weight(params)
        fast = find("row_gradients", h_cd.dtype)
        if fast is not None:
            found = out[-1], out[1] if entropy == "differentiable" else None
            cotangents = ct[0], ct[1] if entropy == "differentiable" else None
            scale_and_cap = head.scale, head.cap
            dz_cv = fast(h_cd @ weight_vd.T, t_c, found, cotangents, scale_and_cap, temperature)
        else:
            z_cv = divided(head.function(params, h_cd).astype(mx.float32))
            logp_cv = z_cv - out[-1][:, None]
            slope_c = divided(ct[0])
            factor_cv = -slope_c[:, None]
            if entropy == "differentiable":
                spread_cv = mx.maximum(logp_cv, LEAST_LOG) + out[1][:, None]
                factor_cv = factor_cv - spread_cv * divided(ct[1])[:, None]
            dz_cv = _added_at(exp(logp_cv) * factor_cv, t_c, slope_c)
            if head.scale != 1 or head.cap is not None:
                # The product inside `function`, in the form that it has there: compiled, it is
                # computed once.
                product_cv = (h_cd[None] @ weight_vd.T)[0]
                dz_cv = dz_cv * head.logit_gradient(product_cv.astype(mx.float32))
            dz_cv = dz_cv.astype(h_cd.dtype)
        dh_cd, dw_vd = dz_cv @ weight_vd, dz_cv.T @ h_cd
        return dh_cd, map_arrays(lambda _: dw_vd, params)

    return in_chunks(forward_chunk, backward_chunk, targets_n, chunk)


def _added_at(array_cv: mx.array, index_c: mx.array, values_c: mx.array) -> mx.array:
    """Adds a number to one entry of each row, in the same pass unless the backend has a faster
    method.
    """
    fast = find("add_at", array_cv)
    if fast is not None:
        return fast(array_cv, index_c, values_c)
    here_cv = mx.arange(array_cv.shape[1], dtype=index_c.dtype)[None] == index_c[:, None]
    return array_cv + mx.where(here_cv, values_c[:, None], 0.0)


def reverse_kl(
    hidden_btd: mx.array,
    head: Head,
    teacher_bte: mx.array,
    teacher_head: Head,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> mx.array:
    """Computes KL(π ‖ μ) = Σ_j p_j (log p_j − log q_j) over the vocabulary, at each position.

    p = softmax(head(hidden)/temperature), and q is the teacher's.

    The reverse KL is the loss of on-policy distillation: GKD (arXiv 2306.13649) with β = 1 and data
    only from the student, or MiniLLM's divergence (arXiv 2306.08543) per token. Vocabularies with
    different padding are compared on the ids that both contain.

    Args:
        hidden_btd: the student's final hidden states [B,T,D].
        head: the student's head.
        teacher_bte: the teacher's hidden states at the same positions, [B,T,E].
        teacher_head: the teacher's head; no gradient flows to it or to its states.
        temperature: divides the logits of both; > 0.
        chunk: positions per chunk; None means half of `chunk_rows`.

    Returns:
        kl_bt float32, nats; gradients flow to `hidden_btd` and the head's parameters.

    Raises:
        ValueError: a shape is wrong.
    """
    check_rank("hidden_btd", hidden_btd, 3)
    check_rank("teacher_bte", teacher_bte, 3)
    rows, length, width = hidden_btd.shape
    check_shape("teacher_bte", teacher_bte, (rows, length, teacher_bte.shape[2]))
    if rows * length == 0:
        return mx.zeros((rows, length))
    vocabulary = min(
        each.function(each.params, states[:1, 0]).shape[-1]  # lazy: a shape, no work
        for each, states in ((head, hidden_btd), (teacher_head, teacher_bte))
    )

    def log_probs(head: Head, params: Tree, h_cd: mx.array) -> mx.array:
        z_cv = head.function(params, h_cd)[:, :vocabulary].astype(mx.float32) / temperature
        return mx.maximum(z_cv - mx.logsumexp(z_cv, axis=-1, keepdims=True), LEAST_LOG)

    def forward_chunk(params: Tree, h_cd: mx.array, teacher_ce: mx.array) -> list[mx.array]:
        logp_cv = log_probs(head, params, h_cd)
        logq_cv = mx.stop_gradient(log_probs(teacher_head, teacher_head.params, teacher_ce))
        return [(mx.exp(logp_cv) * (logp_cv - logq_cv)).sum(axis=-1)]

    compute = in_chunks(
        forward_chunk,
        lambda params, h_cd, teacher_ce, out, ct: autodiff(
            forward_chunk, params, h_cd, teacher_ce, ct
        ),
        mx.stop_gradient(teacher_bte).reshape(rows * length, -1),
        max(chunk_rows(vocabulary) // 2, 1) if chunk is None else chunk,
    )
    return compute(hidden_btd.reshape(-1, width), head.params)[0].reshape(rows, length)


# (head params, hidden_cd, the positions' constants) -> columns [C]
ForwardChunk = Callable[[Tree, mx.array, mx.array], list[mx.array]]
# (head params, hidden_cd, constants, columns, their cotangents) -> the gradients of hidden_cd and
# params
BackwardChunk = Callable[
    [Tree, mx.array, mx.array, list[mx.array], list[mx.array]], tuple[mx.array, Tree]
]


def in_chunks(
    forward: ForwardChunk, backward: BackwardChunk, constants_n: mx.array, chunk: int
) -> Any:
    """Creates a custom function (hidden_nd, head params) -> columns [N], which is computed and
    differentiated for `chunk` positions at a time. No gradient flows to `constants_n`, [N] or
    [N,…].
    """
    starts = range(0, constants_n.shape[0], chunk)

    @mx.custom_function
    def compute(hidden_nd: mx.array, params: Tree) -> list[mx.array]:
        parts: list[list[mx.array]] = []
        for start in starts:
            h_cd = hidden_nd[start : start + chunk]
            if parts:  # one chunk's logits at a time
                h_cd = mx.depends(h_cd, parts[-1])
            parts.append(forward(params, h_cd, constants_n[start : start + chunk]))
        return [mx.concatenate(list(column)) for column in zip(*parts, strict=True)]

    @compute.vjp
    def compute_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        hidden_nd, params = primals
        trains = any(True for _ in arrays_of(params))
        dh_parts: list[mx.array] = []
        dparams: Tree = params
        for start in starts:
            rows = slice(start, start + chunk)
            h_cd = hidden_nd[rows]
            ct_c = [c[rows] for c in cotangents]
            out_c = [o[rows] for o in outputs]
            # enforces an order, so that the weights' gradient accumulates in place, chunk by chunk
            if dh_parts:
                h_cd = mx.depends(h_cd, [dh_parts[-1], *(arrays_of(dparams) if trains else ())])
            dh_cd, grads = backward(params, h_cd, constants_n[rows], out_c, ct_c)
            if len(starts) > 1:  # many small terms: summed in float32, whatever the weights' dtype
                grads = map_arrays(lambda dw: dw.astype(mx.float32), grads)
            dparams = tree_map(mx.add, dparams, grads) if dh_parts and trains else grads
            dh_parts.append(dh_cd)
        if not trains:
            return mx.concatenate(dh_parts), params
        return mx.concatenate(dh_parts), tree_map(lambda dw, w: dw.astype(w.dtype), dparams, params)

    return compute


def autodiff(
    forward: ForwardChunk, params: Tree, h_cd: mx.array, constants_c: mx.array, ct: list[mx.array]
) -> tuple[mx.array, Tree]:
    """Computes a chunk's gradient by automatic differentiation, for functions without a closed
    form.
    """

    def inner(h_cd: mx.array, params: Tree) -> mx.array:
        outs = forward(params, h_cd, constants_c)
        return sum(((o * c).sum() for o, c in zip(outs, ct, strict=True)), start=mx.array(0.0))

    if not any(True for _ in arrays_of(params)):
        return mx.grad(inner)(h_cd, params), params
    return mx.grad(inner, argnums=(0, 1))(h_cd, map_arrays(lambda a: a, params))
