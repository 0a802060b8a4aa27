"""Prompts with images: features that replace the image tokens, and positions for all tokens.

A vision tower computes features of an image, one row for each of its tokens in the prompt. The
rotary embedding of a model for images uses three positions per token: time, row and column. In
text, the three positions are equal.
"""

from collections.abc import Sequence
from itertools import product

import attrs
import mlx.core as mx

from grpo_fn.compile import round_up

Grid = tuple[int, int, int]  # cells of an image, one token per cell: time, rows, columns


@attrs.frozen(eq=False)
class PromptImages:
    """The images in one prompt, for its rollout and its gradient."""

    features_fd: mx.array  # [F,D]: embeddings of the image tokens, in their order
    places: tuple[int, ...]  # F: their indices in the prompt, ascending
    # 3 × L: time, row and column of each token of the prompt
    positions: tuple[tuple[int, ...], ...]

    def __attrs_post_init__(self) -> None:
        if self.features_fd.ndim != 2 or self.features_fd.shape[0] != len(self.places):
            raise ValueError(
                f"features_fd has shape {tuple(self.features_fd.shape)}: expected [F,D] with F = "
                f"{len(self.places)}, the image tokens of the prompt"
            )
        if len(self.positions) != 3 or len(set(map(len, self.positions))) != 1:
            raise ValueError(
                f"positions has rows of {[len(row) for row in self.positions]}: expected three "
                f"of the same length"
            )

    @property
    def shift(self) -> int:
        """Offset for the positions after the prompt, because an image uses fewer positions than
        tokens.
        """
        return 1 + max(map(max, self.positions)) - len(self.positions[0])


@attrs.frozen(eq=False)
class ImageRows:
    """Image features and positions for R rows with L tokens each, as a tree of arrays."""

    features_nd: mx.array  # [N,D]: features in all rows' images; the last ones are unused zeros
    feature_rl: mx.array  # int32 [R,L]: the row of features at each token; −1: its own embedding
    positions_r3l: mx.array  # int32 [R,3,L]
    shift_r: mx.array  # int32 [R]: see `PromptImages.shift`

    def columns(self, start: int, stop: int) -> "ImageRows":
        """Selects the tokens from `start` (included) to `stop` (excluded) in each row."""
        feature_rl, positions_r3l = (
            self.feature_rl[:, start:stop],
            self.positions_r3l[:, :, start:stop],
        )
        return attrs.evolve(self, feature_rl=feature_rl, positions_r3l=positions_r3l)


def image_rows(
    images: Sequence[PromptImages | None], lengths: Sequence[int], length: int, *, repeat: int = 1
) -> ImageRows:
    """Creates rows of `length` tokens that start with these prompts, each repeated `repeat` times.

    Tokens after a prompt are text. The number of features is rounded up by at most an eighth, so
    that compiled steps have few shapes.

    Args:
        images: the images of each prompt; None for a prompt without images.
        lengths: number of tokens in each prompt.
        length: number of tokens per row, at least the longest prompt's.
        repeat: number of rows per prompt.

    Raises:
        ValueError: no prompt has an image, or positions or places do not fit a prompt's length.
    """
    found = [each for each in images if each is not None]
    if not found:
        raise ValueError("expected at least one prompt with images, found none")
    feature_rl = []
    positions_r3l = []
    shifts = []
    count = 0
    for number, (each, size) in enumerate(zip(images, lengths, strict=True)):
        feature = [-1] * length
        positions = [list(range(length))] * 3
        shift = 0 if each is None else each.shift
        if each is not None:
            if len(each.positions[0]) != size or (each.places and each.places[-1] >= size):
                raise ValueError(
                    f"prompt {number} has {size} tokens: its images have {len(each.positions[0])} "
                    f"positions, and the last image token at {each.places[-1:] or None}"
                )
            behind = [place + shift for place in range(size, length)]
            positions = [[*row, *behind] for row in each.positions]
            for row, place in enumerate(each.places, count):
                feature[place] = row
            count += len(each.places)
        feature_rl += [feature] * repeat
        positions_r3l += [positions] * repeat
        shifts += [shift] * repeat
    features = mx.concatenate([each.features_fd for each in found])
    return ImageRows(
        mx.pad(features, [(0, round_up(count) - count), (0, 0)]),
        mx.array(feature_rl, mx.int32),
        mx.array(positions_r3l, mx.int32),
        mx.array(shifts, mx.int32),
    )


def multimodal_positions(
    tokens: Sequence[int], image_token: int, grids: Sequence[Grid]
) -> tuple[tuple[int, ...], ...]:
    """Returns the time, row and column of each token in a prompt, 3 × L (Qwen2-VL, arXiv
    2409.12191, sec. 2.1).

    In text, time, row and column increase together. The tokens of an image have the time, row and
    column of their cell, counted from the end of the preceding text; the following text continues
    after the largest of these.

    Args:
        tokens: the prompt.
        image_token: the id that represents a cell of an image.
        grids: the grid of each image: time, rows, columns. Their product is the number of tokens in
            the image.

    Raises:
        ValueError: the number of consecutive image tokens in the prompt does not fit the grids.
    """
    found: tuple[list[int], ...] = ([], [], [])
    place = following = 0
    for grid in grids:
        try:
            start = tokens.index(image_token, place)
        except ValueError:
            raise ValueError(
                f"the prompt has image tokens for fewer than {len(grids)} images"
            ) from None
        times, rows, columns = grid
        end = start + times * rows * columns
        if list(tokens[start:end]) != [image_token] * (end - start):
            raise ValueError(
                f"an image of {grid} cells requires {end - start} consecutive image tokens"
            )
        for positions in found:
            positions.extend(range(following, following + start - place))
        following += start - place
        cells = list(product(range(times), range(rows), range(columns)))
        for axis, positions in enumerate(found):
            positions.extend(following + cell[axis] for cell in cells)
        following += max(grid)
        place = end
    if image_token in tokens[place:]:
        raise ValueError(f"the prompt has more image tokens than its {len(grids)} images")
    for positions in found:
        positions.extend(range(following, following + len(tokens) - place))
    return tuple(map(tuple, found))
