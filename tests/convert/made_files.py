"""Files of every layout and source that are made here: how, and who reads them without this package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from file_makers import (
    ALPACA,
    AXOLOTL,
    FROM_VALUE,
    KTO,
    LLAVA,
    LOST,
    PAIR,
    PLAIN,
    PROMPT,
    QWEN,
    SHAREGPT,
    SWIFT,
    SWIFT_MEDIA,
    THINKING,
    VLM,
    WHOLE_PAIR,
    answer,
    array,
    bridge_tar,
    clips,
    fine_tuning,
    lines,
    packed,
    packed_tar,
    parquet,
    rows,
    saved,
    saved_rows,
    stream,
    tar,
    unpacked,
    vision,
)
from plain_readers import (
    KnownFile,
    Read,
    alpaca,
    chatml,
    each,
    files_of,
    json_records,
    openai,
    query_response,
    qwen_vl,
    rejected_response,
    web_dataset,
)
from prepared_files import chats, questions, read_chats, read_questions
from trainers_code import by_trl

from energon_packing.convert.config import ColumnMap


def made(name: str, layout: str, source: str, reader: str, make: Any, read: Read, **more: Any) -> KnownFile:
    return KnownFile(name=name, layout=layout, source=source, reader=reader, make=make, read=read, **more)


OPENAI_RULES, TRL_CODE, SWIFT_RULES = "OpenAI's reference", "TRL's `data_utils`", "ms-swift's rules"
LINES, PARQUET = "JSON Lines", "Parquet (`datasets`)"
at_root = lambda read: lambda path: [read(record, path.parent) for record in json_records(path)]  # noqa: E731
MADE = [
    made("LLaVA", "sharegpt", "JSON", "ShareGPT's names", array("llava", LLAVA, 2), at_root(openai), swift=True),
    made(
        "ShareGPT with tools, one record without an answer",
        "sharegpt",
        "JSON",
        "ShareGPT's names",
        array("sharegpt", [*SHAREGPT, LOST]),
        lambda path: [*map(openai, json_records(path)[:2]), None],
        rejected="nothing_to_learn",
    ),
    made("TRL `from` and `value`", "sharegpt", "JSON", TRL_CODE, array("from", FROM_VALUE), each(by_trl), swift=True),
    made("axolotl with `train`", "sharegpt", LINES, "axolotl's fields", lines("axolotl", AXOLOTL), each(openai)),
    made(
        "OpenAI fine-tuning, tools and `weight`",
        "openai",
        LINES,
        OPENAI_RULES,
        lines("ft", fine_tuning()),
        each(openai),
    ),
    made("OpenAI chat with `image_url` data", "openai", LINES, OPENAI_RULES, vision("chat"), each(openai)),
    made("OpenAI Responses with `input_image` data", "openai", LINES, OPENAI_RULES, vision("responses"), each(openai)),
    made("`reasoning_content`", "openai", LINES, "Qwen3's template", lines("thinking", THINKING), each(openai)),
    made(
        "Stanford Alpaca, one empty answer",
        "alpaca",
        "JSON",
        "its prompts",
        array("alpaca", ALPACA),
        lambda path: [*map(alpaca, json_records(path)[:2]), None],
        rejected="empty_turn",
    ),
    made("Alpaca", "alpaca", "JSON", "its prompts", array("alpaca", ALPACA[:2]), each(alpaca), swift=True),
    made(
        "ms-swift `query`, `response`, `history`",
        "query-response",
        LINES,
        SWIFT_RULES,
        lines("swift", SWIFT),
        each(query_response),
        swift=True,
    ),
    made(
        "ms-swift messages with images and `loss`",
        "openai",
        "JSON",
        SWIFT_RULES,
        array("swift", SWIFT_MEDIA, 2),
        at_root(openai),
        swift=True,
    ),
    made(
        "ms-swift with `rejected_response`",
        "openai",
        LINES,
        SWIFT_RULES,
        lines("rlhf", [{"messages": [*PROMPT, answer("A.")], "rejected_response": "B."}]),
        each(rejected_response),
        swift=True,
    ),
    made("Qwen-VL with boxes", "qwen-vl", "JSON", "its finetuning code", array("qwen", QWEN, 2), at_root(qwen_vl)),
    made(
        "TRL language modelling, text",
        "text",
        PARQUET,
        TRL_CODE,
        parquet("text", [{"text": "Once."}, {"text": " Twice\n"}]),
        rows(by_trl),
    ),
    made("TRL language modelling, messages", "openai", PARQUET, TRL_CODE, parquet("messages", PLAIN), rows(by_trl)),
    made(
        "TRL prompt and completion, text",
        "prompt-completion",
        PARQUET,
        TRL_CODE,
        parquet("pc", [{"prompt": "The sky is", "completion": " blue."}]),
        rows(by_trl),
    ),
    made(
        "TRL prompt and completion, messages",
        "prompt-completion",
        LINES,
        TRL_CODE,
        lines("pc", [{"prompt": PROMPT, "completion": [answer("A.")]}]),
        each(by_trl),
    ),
    made("TRL preference, explicit prompt", "openai", PARQUET, TRL_CODE, parquet("dpo", [PAIR]), rows(by_trl)),
    made("TRL preference, implicit prompt", "openai", LINES, TRL_CODE, lines("dpo", [WHOLE_PAIR]), each(by_trl)),
    made(
        "TRL unpaired preference",
        "prompt-completion",
        PARQUET,
        TRL_CODE,
        parquet("kto", KTO),
        rows(by_trl),
        options={"kto_label": "label"},
    ),
    made(
        "TRL vision, image structs, no placeholders",
        "openai",
        PARQUET,
        TRL_CODE,
        parquet("vlm", VLM, images=True),
        rows(partial(by_trl, files=partial(files_of, root=Path()))),
        options={"missing_placeholder": "prepend"},
    ),
    made("videos as files and lists of frames", "openai", LINES, OPENAI_RULES, clips, at_root(openai)),
    made(
        "saved `DatasetDict`",
        "openai",
        "Arrow directory",
        "`datasets`",
        saved,
        lambda path: [openai(record) for record in saved_rows(path)],
    ),
    made(
        "Arrow stream",
        "openai",
        "Arrow",
        "pyarrow",
        stream,
        lambda path: [openai(row) for row in pa.ipc.open_stream(str(path)).read_all().to_pylist()],
    ),
    made("gzip", "openai", "JSON Lines, gzip", OPENAI_RULES, packed(".jsonl.gz"), unpacked),
    made("zstd", "openai", "JSON, zstd", OPENAI_RULES, packed(".json.zst"), unpacked),
    made("WebDataset with images", "openai", "tar (`webdataset`)", "tarfile", tar, web_dataset),
    made("WebDataset, gzip", "openai", "`.tar.gz`", "tarfile", packed_tar(".gz"), web_dataset),
    made("WebDataset, zstd", "openai", "`.tar.zst`", "tarfile", packed_tar(".zst"), web_dataset),
    made("Bridge's ChatML, pickled images and frames", "sharegpt", "tar (`webdataset`)", "pickle", bridge_tar, chatml),
    made("Bridge's ChatML, prepared", "sharegpt", "Energon data set", "Energon's loader, pickle", chats, read_chats),
    made(
        "Energon's `VQASample`",
        "query-response",
        "Energon data set",
        "Energon's loader",
        questions,
        read_questions,
        options={
            "column_map": ColumnMap(columns={"query": "question", "response": "answer"}),
            "missing_placeholder": "prepend",
        },
    ),
]
