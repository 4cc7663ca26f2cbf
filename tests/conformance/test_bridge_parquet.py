"""``pack --format bridge-parquet``: Bridge's own packed data set reads the plan's packs, position by position."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import bridge_here  # noqa: F401
import pytest
import torch
from click.testing import CliRunner

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, ParallelConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.planner import make_plan
from energon_packing.thd.rows import unpack

SEQ_LENGTH = 1024
MOST = 7


def planned(folder, *, context=1, weight=1, **encoder):
    """A plan of texts of one and of several turns, with a weight of each answer."""
    say = "It is what it is. "
    records = [
        {
            "id": f"text-{number}",
            "conversations": [
                turn
                for at in range(1 + number % 3)
                for turn in (
                    {"from": "human", "value": f"Why {at}?"},
                    {"from": "gpt", "value": say * (1 + number % 17)} | ({"weight": weight} if weight != 1 else {}),
                )
            ],
        }
        for number in range(60)
    ]
    (folder / "texts.json").write_text(json.dumps(records))
    convert(ConvertConfig(sources=(folder / "texts.json",), out=folder / "data", split={"train": 1.0}, workers=0))
    run = RunConfig(
        data=DataConfig(path=str(folder / "data"), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("text")), **encoder),
        packing=PackingConfig(
            padding="between",  # as Bridge makes its rows
            seq_length=SEQ_LENGTH,
            drop_budget=1.0,
            max_segments_per_pack=MOST,
            pad_to_max_length=True,
        ),
        parallel=ParallelConfig(context_parallel=context),
        plan=PlanConfig(max_data_parallel=2),
    )
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    make_plan([folder / "index"], run, folder / "plan.parquet")
    return dataclasses.replace(run, data=dataclasses.replace(run.data, path=str(folder / "plan.parquet")))


def pack(folder, *more):
    words = ["pack", folder / "plan.parquet", "--out", folder / "packs", "--format", "bridge-parquet", *more]
    return CliRunner().invoke(cli, [str(word) for word in words])


def fixed_rows(run, dataset, metadata, multiple):
    """Compares Bridge's rows and ours with fixed boundaries (``pad_cu_seqlens``), Bridge's by `pack`'s metadata."""
    from megatron.bridge.data.packing import algorithms

    (sizes,) = json.loads(metadata.read_text())
    items = [dataset[number] for number in range(len(dataset))]
    lengths = [[stop - start - 1 for start, stop in pairwise(item["seq_boundaries"])] for item in items]
    counts = Counter(itertools.chain(*lengths))
    histogram = [counts[length] for length in range(SEQ_LENGTH + 1)]
    with mock.patch.object(algorithms, "first_fit_shuffle", return_value=lengths):
        _, expected = algorithms.create_packing_strategy(histogram, SEQ_LENGTH, "first_fit_shuffle")
    assert sizes == expected
    theirs = type(dataset)(
        file_path=dataset._file_path_spec,
        tokenizer=dataset.tokenizer,
        pad_cu_seqlens=True,
        pad_seq_to_mult=multiple,
        pack_metadata_file_path=str(metadata),
        max_seq_length=SEQ_LENGTH,
        prompt_template="{text} {answer}",
        answer_only_loss=True,
        pad_to_max_length=True,
    )
    own = dataclasses.replace(run, packing=dataclasses.replace(run.packing, pad_cu_seqlens=True))
    ours = [made.batch for made in open_loader(own)]
    stored = metadata.parents[1] / "stored"
    words = ["pack", run.data.path, "--out", stored, "--workers", "0"]
    assert CliRunner().invoke(cli, [str(word) for word in words]).exit_code == 0
    read = open_loader(dataclasses.replace(own, data=dataclasses.replace(own.data, path=str(stored))))
    assert all(torch.equal(made.batch.cu_seqlens, batch.cu_seqlens) for made, batch in zip(read, ours, strict=True))
    names = ("cu_seqlens_q", "cu_seqlens_q_padded")[: 1 + (multiple > 1)]

    def compare(item, number, unfixed):
        batch, row = theirs.collate_fn([item]), ours[number].to_bridge()
        for name in names:
            assert batch[name].numel() == sizes["max_samples_per_bin"] + 2
            assert row[name].numel() == MOST + 2
            assert row[name][unfixed.num_samples + 1 :].unique().numel() == 1  # the rest of the row, again and again
        assert thd.check_thd(ours[number], multiple=multiple) == []
        assert row["max_seqlen_q"] == SEQ_LENGTH
        assert torch.equal(
            row["cu_seqlens_q"][: unfixed.num_samples + 1], unfixed.cu_seqlens[: unfixed.num_samples + 1]
        )

    return compare


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("context", [pytest.param(1, marks=pytest.mark.full), 2])
def test_bridge_reads_the_tokens_targets_and_boundaries_of_every_pack_of_the_plan_in_order(context, tmp_path):
    from megatron.bridge.data.packing.parquet import GPTSFTPackedParquetDataset
    from transformers import AutoTokenizer

    run = planned(tmp_path, context=context)
    done = pack(tmp_path, "--shard-packs", "3", "--workers", "2", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    expected = list(open_loader(run))
    files = sorted((tmp_path / "packs").glob("[!.]*.parquet"))
    assert (report["packs"], report["packed"]) == (len(expected), len(files))
    assert len(files) > 1
    tokenizer = AutoTokenizer.from_pretrained(processor_path("text"))
    multiple = 2 * context if context > 1 else 1
    dataset = GPTSFTPackedParquetDataset(
        file_path=str(tmp_path / "packs"),
        tokenizer=SimpleNamespace(eos_id=tokenizer.eos_token_id, bos_id=None, space_sensitive=False),
        pad_seq_to_mult=multiple,
        max_seq_length=SEQ_LENGTH,
        prompt_template="{text} {answer}",
        answer_only_loss=True,
        pad_to_max_length=False,
    )
    fixed = fixed_rows(run, dataset, tmp_path / "packs" / "metadata.json", multiple)
    assert len(dataset) == len(expected)
    learned = 0
    for number, made in enumerate(expected):
        item = dataset[number]
        fixed(item, number, made.batch)
        dataset.validate_row(number, item["input_ids"], item["loss_mask"], item["seq_boundaries"][:-1])
        batch = dataset.collate_fn([item])
        boundaries = batch["cu_seqlens_q_padded" if multiple > 1 else "cu_seqlens_q"].reshape(-1).tolist()
        for start, row in zip(boundaries, unpack(made.batch), strict=False):
            length = len(row["input_ids"]) - 1
            span = slice(start, start + length)
            assert batch["tokens"][0, span].tolist() == row["input_ids"][:-1].tolist()
            assert batch["loss_mask"][0, span].tolist() == row["loss_mask"][:-1].int().tolist()
            assert batch["position_ids"][0, span].tolist() == list(range(length))
            trained = row["loss_mask"][:-1] > 0
            assert torch.equal(batch["labels"][0, span][trained], row["labels"][:-1][trained])
            learned += int(trained.sum())
        assert int(batch["loss_mask"].sum()) == int((made.batch.loss_mask > 0).sum())
        assert all(place % multiple == 0 for place in boundaries[: len(made.batch.sample_keys)])
    assert learned > 1000
    before = {file.name: file.read_bytes() for file in files}
    files[1].unlink()
    again = json.loads(pack(tmp_path, "--shard-packs", "3", "--workers", "0", "--json").output)
    assert (again["packed"], again["reused"]) == (1, len(files) - 1)
    assert {file.name: file.read_bytes() for file in files} == before


def test_what_bridges_form_cannot_hold_is_refused_by_name(tmp_path):
    planned(tmp_path, weight=0.5)
    done = pack(tmp_path, "--workers", "0")
    assert (done.exit_code, "has loss weights besides 0 and 1" in done.output) == (2, True), done.output
    done = pack(tmp_path, "--store", "pixels")
    assert (done.exit_code, "holds text only" in done.output) == (2, True)
    (tmp_path / "other").mkdir()
    planned(tmp_path / "other", loss_weighting="sample")
    done = pack(tmp_path / "other", "--workers", "0")
    assert (done.exit_code, "weights of 0 and 1 only" in done.output) == (2, True), done.output
    for name in ("metadata.json", "other.parquet"):  # of somebody else
        (tmp_path / "packs" / name).write_bytes(b"theirs")
        done = pack(tmp_path, "--workers", "0")
        assert (done.exit_code, f"holds other files ({name})" in done.output) == (2, True)
        assert (tmp_path / "packs" / name).read_bytes() == b"theirs"
        (tmp_path / "packs" / name).unlink()


def test_media_are_refused_by_the_key_of_their_sample(tmp_path):
    source = make_data(tmp_path / "made", conversations=20, defects=False)
    convert(ConvertConfig(sources=(source,), out=tmp_path / "data", split={"train": 1.0}, workers=0))
    run = RunConfig(
        data=DataConfig(path=str(tmp_path / "data")),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
        packing=PackingConfig(seq_length=2048, drop_budget=1.0),
    )
    measure(MeasureConfig(paths=(Path(tmp_path / "data"),), out=tmp_path / "index", workers=0), run)
    make_plan([tmp_path / "index"], run, tmp_path / "plan.parquet")
    done = pack(tmp_path, "--workers", "0")
    assert done.exit_code == 2
    assert "has media, and --format bridge-parquet holds text only" in done.output


def test_verify_finds_what_is_missing_or_damaged_among_bridges_files(tmp_path):
    planned(tmp_path)
    assert pack(tmp_path, "--shard-packs", "2").exit_code == 0
    files, metadata = sorted((tmp_path / "packs").glob("*.parquet")), tmp_path / "packs" / "metadata.json"
    assert len(files) > 2

    def found():
        done = CliRunner().invoke(cli, ["verify", str(tmp_path / "packs"), "--share", "0"])
        assert done.exit_code in (0, 1), done.output
        return "" if done.exit_code == 0 else done.output

    assert found() == ""
    for file, said in (
        (files[0], "before"),
        (files[1], "before"),
        (files[-1], "after"),
        (metadata, "metadata.json is"),
    ):
        file.rename(tmp_path / "aside")
        assert said in found()
        assert "missing" in found()
        (tmp_path / "aside").rename(file)
    files = [file.rename(file.with_name(f"packs-{at}.idx.parquet")) for at, file in enumerate(files, 99_999)]
    assert found() == "", "numbers may have six digits"
    content = files[1].read_bytes()
    files[1].write_bytes(content[:100] + b"\0" * 8 + content[108:])
    assert "damaged" in found()
