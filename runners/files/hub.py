"""The Hugging Face Hub, or its cache on this machine if the Hub cannot be reached."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from runners.errors import UserError, first_line

_SECONDS = 10  # for the request that tests the connection: huggingface_hub's own limit for a file's head


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Inside the block the Hub's libraries use only their caches if the Hub cannot be reached.

    One request tests that. By themselves the libraries would retry a refused connection six times over half a
    minute, even for files in the cache. If HF_HUB_OFFLINE is set, no request is made.
    """
    from huggingface_hub import constants

    # Both libraries read the value at each request; `datasets` has its own copy once it is imported. Both
    # values are restored, because a later call may reach the Hub again.
    places: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        if not constants.is_offline_mode() and not _reachable(constants.ENDPOINT):
            for place in places:
                place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _reachable(endpoint: str) -> bool:
    from httpx2 import TransportError
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_SECONDS)
    except TransportError:  # refused, unknown, timed out, a proxy that fails
        return False
    return True


@contextmanager
def hub_errors(where: str) -> Iterator[None]:
    """Turns errors of the Hub inside the block into a UserError of one line that starts with `where`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise UserError(f"{where}: access is gated; ask for it on the Hub, then `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"{where}: there is no such folder here and no such model on the Hub") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where}: there is no such folder, it is not in the Hub's cache, and the Hub cannot be reached"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{where}: the download failed ({first_line(error)})") from error
