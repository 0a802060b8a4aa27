"""Faults of the Hugging Face Hub in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from runners.errors import UserError, first_line


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
