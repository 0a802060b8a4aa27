"""The description on a package index: README.md, whose links into the repository would lead nowhere there."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"!?\[([^\]]*)\]\((?![a-z]+:)[^)]*\)")


class Description(MetadataHookInterface):
    """Called by hatchling, as pyproject.toml says."""

    def update(self, metadata: dict) -> None:
        """Add the field `readme`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": without_links(text)}


def without_links(text: str) -> str:
    """Markdown with the text alone of each link or picture that is relative or leads to a heading."""
    return _LINK.sub(r"\1", text)
