"""A hook of the wheel's builder: README.md as a page of a package index, where the files that it links to are not."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class LongDescription(MetadataHookInterface):
    """Sets ``readme`` to README.md without comments and without links into the checkout."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
        text = re.sub(r"\[([^][]+)\]\((?!https?:)[^()]*\)", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
