"""The exact reverse KL to a teacher, KL(π ‖ μ) = Σ_j p_j (log p_j − log q_j), with few logits in memory."""

import mlx.core as mx

from grpo_fn.backends.composed import LEAST_LOG
from grpo_fn.checks import check_rank, check_shape
from grpo_fn.learner.logprobs.token_logprobs import autodiff, chunk_rows, in_chunks
from grpo_fn.policy.head import Head
from grpo_fn.trees import Tree


def reverse_kl(
    hidden_btd: mx.array,
    head: Head,
    teacher_bte: mx.array,
    teacher_head: Head,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> mx.array:
    """KL(π ‖ μ) at each position, over the vocabulary: p = softmax(head(hidden)/temperature), q likewise.

    This is the loss of on-policy distillation: GKD (arXiv 2306.13649) with β = 1 and all data from the
    student, MiniLLM's divergence (arXiv 2306.08543) taken token by token. Vocabularies that are padded to
    different sizes are compared over the ids that both have.

    Args:
        hidden_btd: the student's final hidden states [B,T,D].
        head: the student's.
        teacher_bte: the teacher's hidden states at the same positions, [B,T,E].
        teacher_head: the teacher's; no gradient flows to it, nor to its states.
        temperature: divides the logits of both; > 0.
        chunk: positions whose logits are held at a time; None: half of `chunk_rows`.

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
        lambda params, h_cd, teacher_ce, out, ct: autodiff(forward_chunk, params, h_cd, teacher_ce, ct),
        mx.stop_gradient(teacher_bte).reshape(rows * length, -1),
        max(chunk_rows(vocabulary) // 2, 1) if chunk is None else chunk,
    )
    return compute(hidden_btd.reshape(-1, width), head.params)[0].reshape(rows, length)
