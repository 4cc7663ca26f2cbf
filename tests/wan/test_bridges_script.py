"""What Bridge's ``prepare_dataset_wan.py`` writes is converted and trained by the commands of docs/wan.md."""

import json
import os
import pickle
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from forking_python import quick_python
from support.media_files import write_clip
from support.ranks import ranks_environment

from energon_packing.cli.main import cli

pytest.importorskip("megatron.core", reason="Megatron-Bridge is not installed")

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("ENERGON_PACKING_BRIDGE_MAIN")
SCRIPT = "examples/models/wan/prepare_dataset/prepare_dataset_wan.py"
CLIPS = [(9, 64, 48), (5, 48, 64), (13, 32, 32), (1, 64, 32), (17, 32, 64), (3, 48, 48)]
FRAMES = 3
"""Of each clip, with ``--mode frames``."""


class VideoCapture:
    """OpenCV's, by PyAV: the script reads all frames of a clip, or those of given numbers."""

    def __init__(self, path):
        import av

        with av.open(path) as container:
            self.frames = [frame.to_ndarray(format="bgr24") for frame in container.decode(video=0)]
        self.at = 0

    def get(self, what):
        height, width = self.frames[0].shape[:2]
        return {"count": len(self.frames), "width": width, "height": height}[what]

    def set(self, what, number):
        assert what == "at"
        self.at = number

    def read(self):
        self.at += 1
        return self.at <= len(self.frames), self.frames[self.at - 1] if self.at <= len(self.frames) else None

    def release(self):
        pass


def opencv():
    """What the script takes of OpenCV, which is not installed."""
    module = ModuleType("cv2")
    names = {"FRAME_COUNT": "count", "FRAME_WIDTH": "width", "FRAME_HEIGHT": "height", "POS_FRAMES": "at"}
    for name, value in names.items():
        setattr(module, f"CAP_PROP_{name}", value)
    for name in ("LINEAR", "CUBIC", "NEAREST", "AREA", "LANCZOS4"):
        setattr(module, f"INTER_{name}", name)
    module.COLOR_BGR2RGB, module.VideoCapture = "rgb", VideoCapture
    module.cvtColor = lambda frame, _: np.ascontiguousarray(frame[..., ::-1])
    return module


def by_the_script(folder, pipeline, mode, monkeypatch):
    """Bridge's own program, unmodified, with a tiny pipeline."""
    for number, (frames, width, height) in enumerate(CLIPS):
        write_clip(folder / f"{number}.mp4", frames=frames, width=width, height=height)
        (folder / f"{number}.json").write_text(json.dumps({"caption": f"the red ball rolls {'fast ' * number}"}))
    monkeypatch.setitem(sys.modules, "cv2", opencv())
    words = {"video_folder": folder, "output_dir": folder / "out", "model": pipeline, "device": "cpu"}
    more = {"mode": mode, "num-frames": FRAMES}
    monkeypatch.setattr(
        sys, "argv", ["script", *(str(word) for name, value in (words | more).items() for word in (f"--{name}", value))]
    )
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(f"{CHECKOUT}/{SCRIPT}", run_name="__main__")
    return folder / "out"


def in_its_form(folder, mode):
    """The members that the script of Bridge's commit 067f987 writes, by the writer that it takes."""
    from webdataset import ShardWriter

    (folder / "out").mkdir()
    draw = torch.Generator().manual_seed(0)
    with ShardWriter(str(folder / "out" / "shard-rank00-%06d.tar"), maxcount=10000, verbose=0) as sink:
        for number, (frames, width, height) in enumerate(CLIPS):
            text = torch.zeros(226, 32)
            text[: 5 + number] = torch.randn(5 + number, 32, generator=draw)
            facts = {"video_path": f"/videos/{number}.mp4", "caption": "a ball", "model_version": "wan2.1"}
            shape = ((frames + 3) // 4, height // 8, width // 8)
            for part in range(FRAMES if mode == "frames" else 1):
                count = 1 if mode == "frames" else shape[0]
                latents = torch.randn(4, count, *shape[1:], generator=draw)
                key = f"{number:06}" + (f"_{part + 1:02}" if mode == "frames" else "")
                own = {"processing_mode": mode, "processed_frames": count}
                sink.write({"__key__": key, "pth": latents, "pickle": pickle.dumps(text), "json": facts | own})
    return folder / "out"


def members(folder):
    """Key -> what its members hold, of all shards."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar.getmembers():
                key, _, suffix = member.name.partition(".")
                found.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    return found


@pytest.mark.parametrize("mode", ["video", "frames"])
@pytest.mark.parametrize("written", ["in its form", "by the script"])
def test_a_data_set_of_the_script_is_converted_and_trained_by_the_commands(
    written, mode, pipeline, tmp_path, monkeypatch
):
    if written == "by the script" and not CHECKOUT:
        pytest.skip("ENERGON_PACKING_BRIDGE_MAIN names no checkout of Megatron-Bridge")
    (tmp_path / "source").mkdir()
    place = tmp_path / "source"
    out = in_its_form(place, mode) if written == "in its form" else by_the_script(place, pipeline, mode, monkeypatch)
    found = members(out)
    if written == "by the script":  # so that the other case is of its form
        (place / "form").mkdir()
        form = members(in_its_form(place / "form", mode))
        assert {key: set(parts) for key, parts in found.items()} == {key: set(parts) for key, parts in form.items()}
    shards, data = sorted(map(str, out.glob("*.tar"))), str(tmp_path / "data")
    done = CliRunner().invoke(cli, ["convert", *shards, "--format", "text-to-video", "--out", data, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["written"], report["rejected"]) == (len(found), {})
    assert len(found) == len(CLIPS) * (FRAMES if mode == "frames" else 1)
    program = [quick_python(), str(ROOT / "scripts" / "train.py"), "--cpu", "scripts.launch.tiny:clips"]
    command = [*program, "--data", data, "train.train_iters=2", "dataset.packing.max_segments_per_pack=2"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ranks_environment(), timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    losses = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("step ")]
    print(written, mode, losses)
    assert len(losses) == 2
    assert all(0.1 < loss < 50 for loss in losses)
    assert "trained 2 steps on 1 rank" in ended.stdout
