"""Log-probs, entropies and their gradient from the products with a head's matrix, by a backend's kernels."""

from typing import Any

import mlx.core as mx

from grpo_fn.backends.mechanisms import find


def takes_products(dtype: mx.Dtype) -> bool:
    """Whether this machine's backend has both kernels, for products of this dtype."""
    return find("row_logprobs", dtype) is not None and find("row_gradients", dtype) is not None


def row_logprobs(product_cv: mx.array, *arguments: Any) -> tuple[mx.array, mx.array, mx.array]:
    """log softmax at the targets, the entropy and log Σ e^z of each row; `takes_products` must hold."""
    return find("row_logprobs", product_cv.dtype)(product_cv, *arguments)


def row_gradients(product_cv: mx.array, *arguments: Any) -> mx.array:
    """The gradient of both in the products; `takes_products` must hold."""
    return find("row_gradients", product_cv.dtype)(product_cv, *arguments)
