"""Builds the description for a package index: README.md without links into the repository, which do
not work there.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"!?\[([^\]]*)\]\((?![a-z]+:)[^)]*\)")


class Description(MetadataHookInterface):
    """Called by hatchling, as configured in pyproject.toml."""

    def update(self, metadata: dict) -> None:
        """Add the field `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links(text)}


def without_links(text: str) -> str:
    """Markdown in which each link or picture that is relative or leads to a heading is replaced by
    its text.
    """
    return _LINK.sub(r"\1", text)
