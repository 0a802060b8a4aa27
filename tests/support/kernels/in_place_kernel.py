"""What the kernel of CUDA's `prefix_attention` has to do, in NumPy: specification and stand-in."""

from typing import Any

import mlx.core as mx
import numpy as np


def attention(*given: Any) -> np.ndarray:
    """The definition, row by row and head by head, float64 [B,H,1,D], of `append_and_attend`'s arguments."""
    *arrays, prompt_of, lengths, used, scale = given
    q, new_k, new_v, prompt_k, prompt_v, own_k, own_v = (
        np.array(a.astype(mx.float32), np.float64) for a in arrays
    )
    out = np.zeros(q.shape)
    repeats = q.shape[1] // own_k.shape[1]
    for row, p in enumerate(prompt_of):
        for head in range(q.shape[1]):
            h = head // repeats
            k, v = (
                np.concatenate([prompt[p, h, : lengths[p]], own[row, h, :used], new[row, h]])
                for prompt, own, new in ((prompt_k, own_k, new_k), (prompt_v, own_v, new_v))
            )
            scores = k @ q[row, head, 0] * scale
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights / weights.sum() @ v
    return out


class InPlaceKernel:
    """Stands in for `append_and_attend` where nothing is compiled, and writes through as it does.

    Attributes:
        calls: rows, room for own tokens and own tokens so far, at each call of a layer.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, *given: Any) -> mx.array:
        """As `append_and_attend`."""
        *arrays, prompt_of_b, lengths_p, own_length, scale = given
        _, new_keys, new_values, _, _, own_keys, own_values = arrays
        rows, _, room, _ = own_keys.shape
        used = int(own_length.item())
        assert prompt_of_b.shape == (rows,) and 0 <= used < room
        self.calls.append((rows, room, used))
        found = attention(*arrays, prompt_of_b.tolist(), lengths_p.tolist(), used, scale)
        for buffer, new in ((own_keys, new_keys), (own_values, new_values)):
            held = np.array(buffer, copy=False)  # a view of the array's own memory
            assert held.flags.c_contiguous, "MLX would hand a kernel a copy of it"
            held[:, :, used] = np.array(new)[:, :, 0]
        return mx.array(found.astype(np.float32))
