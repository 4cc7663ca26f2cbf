"""`energon-packing init`: writes a configuration file with comments for a data set and a processor."""

import json
import os
from pathlib import Path
from typing import Any

import click

from energon_packing.cli.options import AT_LEAST_1, FILE, defaulted, json_option
from energon_packing.cli.terminal import answer, starting
from energon_packing.errors import UserError

_EXAMPLES = """
Examples:

\b
  energon-packing init data/packed --processor Qwen/Qwen3-VL-8B-Instruct
  energon-packing init data/packed --processor models/qwen --seq-length 16384 --out run.yaml
  energon-packing init data/packed --processor models/qwen --context-parallel 2 --schema run.schema.json
"""


@click.command(epilog=_EXAMPLES)
@click.argument("dataset", type=click.Path())
@click.option("--processor", required=True, help="Directory or hub name of a Hugging Face processor or tokenizer.")
@defaulted("--out", default="run.yaml", type=FILE)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@defaulted("--seq-length", default=8192, type=AT_LEAST_1, help="Tokens of a row.")
@defaulted("--global-batch-size", default=8, type=AT_LEAST_1, help="Rows of a step.")
@defaulted("--tensor-parallel", default=1, type=AT_LEAST_1)
@defaulted("--context-parallel", default=1, type=AT_LEAST_1)
@click.option("--schema", type=FILE, help="Also write a JSON Schema for editors.")
@json_option
def init(
    dataset: str, processor: str, out: Path, force: bool, schema: Path | None, as_json: bool, **sizes: int
) -> None:
    """Write a configuration file with comments for DATASET.

    Every setting is in it: those that you give, and all others as comments with their defaults.
    """
    starting(f"Writing {out}", quiet=as_json)
    from energon_packing.config import ParallelConfig
    from energon_packing.convert.layout import dataset_entry
    from energon_packing.offline.data_paths import has_global_packs
    from energon_packing.report.page import write_whole
    from energon_packing.report.settings import json_schema, sketched_run
    from energon_packing.thd.alignment import check_multiple

    if not os.path.exists(dataset):
        raise UserError(f"There is no data set {dataset}; `energon-packing convert` makes one.")
    if not has_global_packs(dataset):
        dataset_entry(dataset)
    for path in (out, *([schema] if schema else [])):
        if path.exists() and not force:
            raise UserError(f"{path} exists already; name another file, or replace it with --force.")
    parallel: dict[str, Any] = {f"{kind}_parallel": sizes[f"{kind}_parallel"] for kind in ("tensor", "context")}
    # Tensor parallelism without it is refused by several models of Bridge.
    parallel |= {"sequence_parallel": True} if sizes["tensor_parallel"] > 1 else {}
    check_multiple("--seq-length", sizes["seq_length"], ParallelConfig(**parallel).multiple)
    given: dict[str, Any] = {
        "data.path": dataset,
        "data.workers": 2,
        "encoder.processor": processor,
        "packing.seq_length": sizes["seq_length"],
        "packing.window": 256,
        **{f"parallel.{name}": size for name, size in parallel.items()},
        "training.micro_batch_size": 1,
        "training.global_batch_size": sizes["global_batch_size"],
    }
    beside = None if schema is None else os.path.relpath(schema.absolute(), out.absolute().parent)
    write_whole(out, sketched_run(given, schema=beside))
    if schema is not None:
        write_whole(schema, json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")

    written = f"Written: {out}{f' and {schema}' if schema else ''}\nNext: energon-packing validate {out}"
    answer({"out": str(out), "schema": schema and str(schema)}, as_json, lambda _: click.echo(written))
