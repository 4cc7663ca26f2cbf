"""The Hugging Face hub as far as it lies on this machine: its cache. Nothing here may reach the network."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

# As the hub writes its names; a dot or a slash in front says a path, and so does a second slash.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_FILES = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json", "config.json")


def is_hub_name(name: str) -> bool:
    """Whether ``owner/name`` can only be the hub's: a path whose folder ``owner`` is here means that folder."""
    return _NAME.match(name) is not None and not Path(name.partition("/")[0]).is_dir()


def cached_directory(name: str) -> Path | None:
    """Where the cache of this machine keeps the files of a name; None where it has none of a processor's.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = (try_to_load_from_cache(name, file) for file in _FILES)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)
    except HFValidationError:
        return None


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """What is loaded inside comes from this machine or not at all, code of a repository (``auto_map``) included.

    ``local_files_only`` would not reach everything that transformers loads beside a processor; the hub's own switch
    refuses each request. Set on the module: its environment variable is read at import only.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
