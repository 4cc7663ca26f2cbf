"""LLaMA-Factory's demo files, where ``LLAMAFACTORY_DATA`` names the directory ``data`` of its source distribution."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plain_readers import KnownFile, Read, each, json_records, openai, v1
from trainers_code import LLAMA_FACTORY, by_llama_factory

DEMO = Path(os.environ.get("LLAMAFACTORY_DATA", "nowhere"))
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "llamafactory_demo"


def entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEMO / "dataset_info.json").read_text())[name]
    return found


def real(name: str) -> Callable[[Path], Path | None]:
    """A demo file of LLaMA-Factory, from its source distribution or the three that are shared."""

    def find(scratch: Path) -> Path | None:
        return next((folder / name for folder in (DEMO, SHARED) if (folder / name).is_file()), None)

    return find


def demo(name: str) -> Callable[[Path], Path | None]:
    def find(scratch: Path) -> Path | None:
        return DEMO / str(entry(name)["file_name"]) if LLAMA_FACTORY.is_dir() else None

    return find


def own_reader(name: str) -> Read:
    return lambda path: list(by_llama_factory(entry(name), json_records(path), DEMO))


def of_demo(name: str, formatting: str) -> KnownFile:
    """A demo file that is converted through its entry."""
    return KnownFile(
        name=f"LLaMA-Factory `{name}`",
        layout=f"{formatting} (dataset_info)",
        source="text" if name.startswith("wiki") else "JSON Lines" if name.startswith("c4") else "JSON",
        reader="LLaMA-Factory's converter",
        make=demo(name),
        read=own_reader(name),
        options={"entry": name},
    )


def of_v1(name: str, rejected: str = "") -> KnownFile:
    return KnownFile(
        name=f"LLaMA-Factory `{name}`",
        layout="llamafactory-v1",
        source="JSON Lines",
        reader="its renderer, restated",
        make=real(f"{name}.jsonl"),
        read=each(v1),
        rejected=rejected,
    )


def of_sound(name: str) -> KnownFile:
    return KnownFile(
        name=f"LLaMA-Factory `{name}`",
        layout="",
        source="JSON",
        reader="",
        make=real(f"{name}.json"),
        read=lambda path: [None for _ in json_records(path)],
        rejected="unsupported_column",
    )


REAL = [
    *(of_demo(name, "alpaca") for name in ("identity", "alpaca_en_demo", "alpaca_zh_demo", "c4_demo", "wiki_demo")),
    *(of_demo(name, "sharegpt") for name in ("glaive_toolcall_en_demo", "glaive_toolcall_zh_demo")),
    *(of_demo(name, "sharegpt") for name in ("dpo_en_demo", "dpo_zh_demo", "kto_en_demo")),
    *(of_demo(name, "sharegpt") for name in ("mllm_demo", "mllm_video_demo")),
    of_v1("v1_sft_demo"),
    of_v1("v1_dpo_demo"),
    of_v1("reason_tool_use_demo_50", "conflicting_thinking"),
    of_sound("mllm_audio_demo"),
    of_sound("mllm_video_audio_demo"),
    *(
        KnownFile(
            name=f"`{name}` without its entry",
            layout=layout,
            source="JSON",
            reader="rules of OpenAI and ShareGPT",
            make=real(f"{name}.json"),
            read=lambda path: [openai(record, path.parent) for record in json_records(path)],
            swift=True,
        )
        for name, layout in (
            ("glaive_toolcall_en_demo", "sharegpt"),
            ("mllm_demo", "openai"),
            ("mllm_video_demo", "openai"),
        )
    ),
]
