"""Rows of a data set on the Hub, by `datasets`, or from what `hf download` left in the Hub's cache."""

from pathlib import Path

from runners.config.sections import DataConfig
from runners.data.row_files import RawRow, find_split, read_file
from runners.errors import UserError, error_line, show

_CONFIGS = {"openai/gsm8k": "main", "gsm8k": "main"}
_TOGETHER = 1000  # rows that become Python's objects at a time


def hub_rows(config: DataConfig, split: str, key: str) -> list[RawRow]:
    """The rows of a split. UserError, with the split's `key`, if the Hub does not give it."""
    import datasets

    from runners.data.parquet_rows import table_rows

    name = config.name or _CONFIGS.get(config.source)
    try:
        found = datasets.load_dataset(config.source, name, split=split)
        # As Arrow's tables: images and sounds stay the bytes of their files.
        tables = found.with_format("arrow").iter(_TOGETHER)  # type: ignore[union-attr]
        rows = enumerate((row for table in tables for row in table_rows(table)), 1)
        return [RawRow(f"{config.source} ({split}), row {number}", *row).sized() for number, row in rows]
    except Exception as error:  # from the Hub, the network, the disk or the format: each is shown to the user
        folder = _downloaded(config.source, name or "")
        if folder is not None and not isinstance(error, ValueError):
            return [raw for path in find_split(folder, split, key) for raw in read_file(path)]
        if isinstance(error, ConnectionError | TimeoutError):
            place = f"data.source is {show(config.source)}, neither a local path nor within reach on the Hub"
        elif isinstance(error, ValueError) and "split" in str(error):
            place = f"{key} is {show(split)}, which {config.source} does not have"
        else:
            place = f"data.source is {show(config.source)}, which the Hub did not give"
        raise UserError(f"{place}: {error_line(error)}") from error


def _downloaded(source: str, name: str) -> Path | None:
    """A data set's folder in the Hub's cache, where `datasets` does not look; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        whole = Path(snapshot_download(source, repo_type="dataset", local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return whole / name if name and (whole / name).is_dir() else whole
