"""All that the lock takes from inside the package under test and from the fixtures; a move changes this file only."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from support.offline_processors import PROCESSORS

from energon_packing.cli.main import cli
from energon_packing.config import load_config
from energon_packing.demo import processor_path
from energon_packing.offline.open_loader import open_loader
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_facts import TokenFacts
from energon_packing.validate.run_view import RunView
from energon_packing.wan.config import load_text_to_video_config

__all__ = ["PROCESSORS", "command", "load_config", "load_text_to_video_config", "open_loader", "processor_path"]


def command(*words: str) -> tuple[int, str]:
    """Runs ``energon-packing WORDS`` in this process; its exit code and what it printed to stdout."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    code = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(list(words), prog_name="energon-packing")
        except SystemExit as end:
            code = end.code
    return int(code or 0), printed.buffer.getvalue().decode()


def outcomes(run: Mapping[str, Any], version: str) -> list[str]:
    """The verdict on a run: ``rule=outcome`` of every rule that speaks.

    Args:
        run: fields of a view by their names; facts about tokens as mappings.
        version: of Megatron-Bridge.
    """
    fields = {name: TokenFacts(**value) if name.endswith("_tokens") else value for name, value in run.items()}
    judged = judge(RunView(**fields, bridge_version=version))
    return [f"{one.rule.id}={one.outcome}" for one in judged if one.outcome not in ("ok", "not applicable")]
