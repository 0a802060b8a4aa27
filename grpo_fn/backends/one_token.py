"""What the caches of decoding steps have in common: one new token a row and call."""


class OneTokenCache:
    """A cache that takes one new token a row and call."""

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: a new token sees all that came before it."""
        if length != 1 or window_size is not None:
            raise ValueError(f"length = {length}, window_size = {window_size}: wanted 1 and no window")
