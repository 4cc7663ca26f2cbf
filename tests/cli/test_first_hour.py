"""What a new user meets before anything runs: full disks, terminals, a hub that is away, extras, misnamed files."""

import errno
import functools
import importlib
import io
import json
import os
import re
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import energon_packing
from energon_packing.cli.main import cli, main
from energon_packing.config import EncoderConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError, UserError
from energon_packing.families import registry
from energon_packing.families.registry import TESTED, warn_of_untested_releases
from energon_packing.media.video import decode_frames
from energon_packing.report.page import write_whole
from energon_packing.sample_kind import what_is_needed
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


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_video_without_pyav_is_a_sentence_with_the_extra_and_no_damaged_file(tmp_path, monkeypatch, workers):
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "clip.mp4").write_bytes(b"clip")
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "A boat."}]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": turns, "videos": ["clip.mp4"]}]))
    given = ["convert", str(tmp_path / "a.json"), "--media-root", str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli, [*given, "--workers", workers])
    assert (result.exit_code, "pip install '.[video]' in the checkout" in result.stderr) == (2, True), result.output
    with pytest.raises(UserError, match=r"pip install '\.\[video\]' in the checkout"):
        decode_frames(b"clip", [0], max_pixels=1)


def test_the_processors_of_the_demo_need_no_pyav_and_its_clips_name_the_extra(tmp_path, monkeypatch):
    demo = sys.modules["energon_packing.demo"]
    monkeypatch.setattr(energon_packing, "demo", demo)  # which the import below replaces
    for name in [name for name in sys.modules if name.startswith(demo.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "av", None)
    demo = importlib.import_module(demo.__name__)
    assert demo.processor_path("qwen2_5_vl") == processor_path("qwen2_5_vl")
    with pytest.raises(UserError, match=r"pip install '\.\[video\]' in the checkout"):
        demo.make_data(tmp_path / "demo", conversations=1)


def test_a_module_of_bridge_is_of_no_extra():
    error = ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")
    assert "bash scripts/setup.sh" in (what_is_needed(error, "a step") or "")


@pytest.mark.parametrize(
    ("name", "installed", "said"),
    [
        ("transformers", "5.3.0", "transformers 5.3.0 is outside.*GLM-4.1V"),
        ("transformers", "5.25.0", "outside of the tested >=5.10.1,<5.25: it is newer"),
        ("megatron-energon", "7.3.1", "restore keys"),
        ("torch", "2.5.1", "torch 2.5.1 is outside"),
        ("torch", "2.9.0a0+of.a.container", None),
        ("torch", None, None),
    ],
)
def test_a_release_outside_of_the_tested_bounds_is_warned_of_once_with_the_reason(monkeypatch, name, installed, said):
    def version(asked):
        if asked == name and installed is None:
            raise registry.PackageNotFoundError
        return installed if asked == name else TESTED[asked][0]

    monkeypatch.setattr(registry, "version", version)
    monkeypatch.setattr(registry, "warn_of_untested_releases", functools.cache(warn_of_untested_releases.__wrapped__))
    config = EncoderConfig(processor=str(processor_path("qwen2_5_vl")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            registry.build_family(registry.load_processor(config), config)
    told = [str(each.message) for each in caught if "outside" in str(each.message)]
    assert len(told) == (said is not None)
    assert said is None or re.search(said, told[0])


def test_the_bounds_that_are_warned_of_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    bounds = {text.name: str(text.specifier) for text in map(Requirement, project["optional-dependencies"]["vlm"])}
    for name, (first, end, _) in TESTED.items():
        assert bounds[name] == f"<{end},>={first}"


class ConnectError(Exception):
    """Of the hub's client: httpx, or httpx2 from huggingface_hub 2 on."""


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, answers):
    import huggingface_hub
    import transformers

    from energon_packing.families.registry import load_processor

    def head(url, timeout):
        if not answers:
            raise ConnectError("Name or service not known")

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
