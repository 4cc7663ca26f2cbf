"""What a new user meets before anything runs: full disks, terminals, a hub that is away, extras, misnamed files."""

import errno
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import energon_packing
from energon_packing.cli.main import main
from energon_packing.config import EncoderConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.errors import ConfigError, UserError
from energon_packing.report.page import write_whole
from energon_packing.validate.run_source import run_source


@pytest.mark.parametrize("before", [None, "theirs"])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, before):
    file = tmp_path / "run.yaml"
    if before is not None:
        file.write_text(before)

    def write_half(path, content):
        path.open("wb").write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(UserError, match=r"run\.yaml cannot be written: No space left"):
        write_whole(file, "ours")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == ({"run.yaml": before} if before else {})


def test_a_file_is_replaced_behind_its_link_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for content in ("first", "second"):
        write_whole(tmp_path / "link", content)
        assert ((tmp_path / "link").is_symlink(), (tmp_path / "file").read_text()) == (True, content)
    read, written = os.pipe()
    (tmp_path / "stdout").symlink_to(f"/dev/fd/{written}")  # as /dev/stdout is one
    write_whole(tmp_path / "stdout", "third")
    assert (os.read(read, 9), os.readlink(tmp_path / "stdout")) == (b"third", f"/dev/fd/{written}")
    write_whole(Path("/dev/null"), "third")
    assert Path("/dev/null").is_char_device()


def test_a_terminal_that_is_not_utf8_shows_escapes(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["energon-packing", "--version"])
    with pytest.raises(SystemExit):
        main()
    terminal.write("\u258f")
    assert terminal.buffer.getvalue().endswith(b"\\u258f")


def test_a_public_name_of_a_base_install_says_which_extra_it_needs(monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr(energon_packing, "importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(ModuleNotFoundError, match=r"build_loader needs torch.*pip install '\.\[vlm\]'"):
        energon_packing.build_loader  # noqa: B018


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, answers):
    httpx = pytest.importorskip("httpx")
    import huggingface_hub
    import transformers

    from energon_packing.families.registry import load_processor

    def head(url, timeout):
        if not answers:
            raise httpx.ConnectError("Name or service not known")

    def from_pretrained(name, **_):
        raise OSError("offline" if huggingface_hub.constants.HF_HUB_OFFLINE else "online")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", from_pretrained)
    with pytest.warns(UserWarning, match="does not answer") if not answers else pytest.raises(ConfigError):
        with pytest.raises(ConfigError, match="offline" if not answers else "online") as said:
            load_processor(EncoderConfig(processor="owner/name"))
        if answers:
            raise said.value


def test_a_file_that_cannot_be_read_is_said_to_be_so():
    with pytest.raises(ConfigError, match="/proc/self/mem cannot be read"):
        run_source(("/proc/self/mem",))


@pytest.mark.parametrize(
    ("content", "refused"),
    [('\n \n{"text": "a"}\n', True), ("{ a brace\n", False), ("text\n", False)],
    ids=["lines", "brace", "text"],
)
def test_json_lines_in_a_text_file_are_not_trained_as_documents(tmp_path, content, refused):
    (tmp_path / "a.txt").write_text(content)
    config = ConvertConfig(sources=(tmp_path / "a.txt",), out=Path(), dry_run=True, workers=0)
    if refused:
        with pytest.raises(UserError, match=r"a\.txt holds JSON Lines.*rename it to \.jsonl"):
            convert(config)
    else:
        assert convert(config).written == 1
