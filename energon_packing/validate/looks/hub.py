"""The cache of the Hugging Face hub on this machine. Nothing here may reach the network."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

# The hub's form of names; a leading dot or slash marks a path, and so does a second slash.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
_FILES = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json", "processor_config.json", "config.json")


def is_hub_name(name: str) -> bool:
    """Whether ``owner/name`` can only be the hub's: a path whose folder ``owner`` is here means that folder."""
    return _NAME.match(name) is not None and not Path(name.partition("/")[0]).is_dir()


def cached_directory(name: str) -> Path | None:
    """Where this machine's cache keeps the files of a name; None if it has no processor files for it, or no hub."""
    try:
        from huggingface_hub import constants

        # What `try_to_load_from_cache` looks for first. It stands beside the downloads, whose import takes 0.2 seconds.
        if not (Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import try_to_load_from_cache

        found = (try_to_load_from_cache(name, file) for file in _FILES)
        return next((Path(file).parent for file in found if isinstance(file, str)), None)
    except (ImportError, ValueError):  # HFValidationError is one
        return None


def offline() -> contextlib.AbstractContextManager[Any]:
    """Inside the block everything is loaded from this machine or not at all, repository code (``auto_map``) included.

    ``local_files_only`` does not reach everything that transformers loads with a processor; the hub's own switch
    refuses each request. It is set on the module, because the environment variable is read only at import.
    """
    from unittest import mock

    from huggingface_hub import constants

    return mock.patch.object(constants, "HF_HUB_OFFLINE", True)
