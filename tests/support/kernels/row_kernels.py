"""What the kernels of `backends/cuda/logit_kernels` do, in NumPy float64: their specification, stand-ins."""

import mlx.core as mx
import numpy as np


def _logits(products, scale_cap):
    """Logits, and their gradients in the products."""
    scale, cap = scale_cap
    if cap is None:
        return scale * products, np.full(products.shape, scale)
    tanh = np.tanh(scale * products / cap)
    return cap * tanh, scale * (1 - tanh**2)


def logprobs(products, targets, scale_cap, temperature):
    """logp and entropy of each row, and log-probs of the whole vocabulary."""
    z = _logits(products, scale_cap)[0] / temperature
    top = z.max(axis=-1, keepdims=True)
    every = z - top - np.log(np.exp(z - top).sum(axis=-1, keepdims=True))
    probs = np.exp(every)
    entropy = -np.where(probs > 0, probs * np.where(probs > 0, every, 0), 0).sum(axis=-1)
    return every[np.arange(len(targets)), targets], entropy, every


def gradients(products, targets, by_logp, by_entropy, scale_cap, temperature):
    """The gradient in the products of Σ by_logp · logp + by_entropy · H."""
    _, entropy, every = logprobs(products, targets, scale_cap, temperature)
    probs = np.exp(every)
    hit = np.eye(products.shape[1])[targets]
    dz = by_logp[:, None] * (hit - probs) - by_entropy[:, None] * probs * (every + entropy[:, None])
    return dz / temperature * _logits(products, scale_cap)[1]


def _lse(products, scale_cap, temperature):
    """log Σ e^z of each row."""
    return np.logaddexp.reduce(_logits(products, scale_cap)[0] / temperature, axis=-1)


def float64(array):
    """The array's numbers."""
    return np.array(array.astype(mx.float32), np.float64)


def row_logprobs(product_cv, targets_c, scale_cap, temperature):
    """Stands in for the kernel of that name where nothing is compiled."""
    logp, entropy, _ = logprobs(float64(product_cv), np.array(targets_c), scale_cap, temperature)
    lse = _lse(float64(product_cv), scale_cap, temperature)
    return tuple(mx.array(column.astype(np.float32)) for column in (logp, entropy, lse))


def row_gradients(product_cv, targets_c, found, up, scale_cap, temperature):
    """Stands in for the kernel of that name."""
    products = float64(product_cv)
    lse, entropy = (
        _lse(products, scale_cap, temperature),
        logprobs(products, np.array(targets_c), scale_cap, temperature)[1],
    )
    assert np.allclose(float64(found[0]), lse, atol=1e-4), "not what the other kernel found"
    if up[1] is not None:
        assert np.allclose(float64(found[1]), entropy, atol=1e-4)
    by_entropy = np.zeros(len(lse)) if up[1] is None else float64(up[1])
    dz = gradients(products, np.array(targets_c), float64(up[0]), by_entropy, scale_cap, temperature)
    return mx.array(dz.astype(np.float32)).astype(product_cv.dtype)
