"""`preview --format text-to-video` shows the packs that the loader gives, and no others."""

import errno
import itertools
import json
import tarfile

import pytest
from click.testing import CliRunner
from megatron.energon.cache.file_store import WebdatasetFileStore
from support.storage import Storage

from energon_packing.cli.main import cli
from energon_packing.wan.config import load_text_to_video_config
from energon_packing.wan.task_encoder import build_text_to_video_loader


@pytest.fixture
def config_file(tmp_path, pipeline):
    path = tmp_path / "wan.yaml"
    encoder = f"{{latent_channels: 4, text_width: 32, max_pixels: 3072, vae: {pipeline}, text_encoder: {pipeline}}}"
    packing = "{seq_length: 96, max_text_tokens_per_pack: 64, window: 16, drop_budget: 1.0}"
    parallel = "{context_parallel: 2}"
    path.write_text(f"encoder: {encoder}\npacking: {packing}\nparallel: {parallel}\n")
    return path


def invoke(*arguments):
    return CliRunner().invoke(cli, ["preview", *map(str, arguments)])


def test_preview_describes_the_packs_of_the_loader_as_json_and_as_a_table(dataset, config_file, monkeypatch):
    result = invoke(dataset, "--format", "text-to-video", "--config", config_file, "--packs", 3, "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    config = load_text_to_video_config(config_file, [f"data.path={dataset}", "data.workers=0", "data.repeat=false"])
    packs = list(itertools.islice(build_text_to_video_loader(config), 3))
    assert [[clip["key"] for clip in view["clips"]] for view in shown["packs"]] == [list(pack.keys) for pack in packs]
    for view, pack in zip(shown["packs"], packs, strict=True):
        batch = pack.batch
        assert [clip["patches"] for clip in view["clips"]] == batch.seq_len_q.tolist()
        assert [clip["text_tokens"] for clip in view["clips"]] == batch.seq_len_kv.tolist()
        assert [clip["grid"] for clip in view["clips"]] == batch.grid_sizes.tolist()
        assert view["latents"] == list(batch.video_latents.shape)
        assert view["patches"] == sum(clip["patches"] + clip["padding"] for clip in view["clips"])
        assert view["real_patches"] == sum(clip["weight"] for clip in view["clips"])
        ends = [clip["start"] + clip["patches"] + clip["padding"] for clip in view["clips"]]
        assert [clip["start"] for clip in view["clips"]] == [0, *ends[:-1]]
        assert view["fill"] == view["real_patches"] / 96
    monkeypatch.setenv("COLUMNS", "200")
    table = invoke(dataset, "--format", "text-to-video", "--config", config_file, "--packs", 1).output
    assert all(key in table for key in packs[0].keys)
    assert f"{int(packs[0].batch.seq_len_q.sum())} patches in rows of 96" in table


def test_preview_does_not_wait_for_a_storage_that_is_away(dataset, config_file, monkeypatch):
    words = (dataset, "--format", "text-to-video", "--config", config_file, "--packs", 1)
    reads = [(tarfile.ExFileObject, "read"), (WebdatasetFileStore, "_get_part_by_raw_sample_pointer")]
    storage = Storage(monkeypatch, reads, lambda: OSError(errno.EIO, "Input/output error"), after=1, seconds=1e9)
    shown = invoke(*words)
    assert (shown.exit_code, storage.failed > 0) == (2, True), shown.output
    assert sum(storage.pauses) < 5


def test_a_mistake_is_one_sentence_and_exit_code_2(dataset, config_file, tmp_path):
    wrong = invoke(dataset, "--format", "text-to-video", "--config", config_file, "--set", "packing.seq_lenght=8")
    assert wrong.exit_code == 2
    assert "seq_length" in wrong.output
    nothing = invoke(tmp_path / "nothing", "--format", "text-to-video", "--config", config_file)
    assert nothing.exit_code == 2
    assert "Traceback" not in nothing.output
