"""Fuzzing of what reads bytes from elsewhere: ``scripts/fuzz.py TARGET --minutes N``.

Targets: records, media, tensors, state, yaml, plan. Each begins with good files and changes them at random: bytes in
one half of the cases, and in the other by their form (`fuzz_changes`), with right checksums. A reader may refuse in
its documented way; any other exception, a crash, and more than `--seconds` for one case are found cases. They are
written to tests/fuzz_corpus/TARGET, which a test reads from then on. Exit code 1 if something was found.
"""

import argparse
import functools
import hashlib
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fuzz_changes import (
    Change,
    changed,
    json_changed,
    media_changed,
    parquet_changed,
    tensor_changed,
    yaml_changed,
    zip_changed,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CORPUS = ROOT / "tests" / "fuzz_corpus"
BATCH = 200
"""Cases of one child process; a crash is looked for among them one by one."""


class Target:
    """What is fuzzed.

    Args:
        seeds: makes good inputs, in an empty folder.
        read: takes an input, and a folder for files; raises only what `allowed` names.
        allowed: exceptions that refuse an input.
        change: changes an input by its form.
    """

    def __init__(
        self,
        seeds: Callable[[Path], list[bytes]],
        read: Callable[[bytes, Path], Any],
        allowed: Callable[[], Any],
        change: Change = changed,
    ) -> None:
        self.seeds, self.read, self.allowed, self.change = seeds, read, allowed, change


def _rejected() -> Any:
    from energon_packing.errors import SampleRejected

    return SampleRejected


def _user_error() -> Any:
    from energon_packing.errors import UserError

    return UserError


def _record_seeds(folder: Path) -> list[bytes]:
    import tarfile

    from energon_packing.convert import ConvertConfig, convert
    from energon_packing.demo import make_data

    source = make_data(folder / "raw", conversations=30, seed=1, defects=False)
    convert(ConvertConfig(sources=(source,), out=folder / "data", split={"train": 1.0}, workers=0))
    found = []
    for shard in (folder / "data" / "text").glob("*.tar"):
        with tarfile.open(shard) as tar:
            found += [stream.read() for member in tar if (stream := tar.extractfile(member))]
    return found


def _read_record(data: bytes, folder: Path) -> None:
    from energon_packing.conversation import Conversation
    from energon_packing.energon.cookers import cook_record

    class Sample(dict[str, Any]):
        pass

    cooked = cook_record(
        Sample(json=data, __key__="key", __restore_key__=(), __subflavors__={}, __sources__=()),
        primary=None,
        media=None,
    )
    conversation = cooked.conversation
    if conversation is None:
        assert cooked.problem is not None, "a record is neither accepted nor refused"
        unforeseen = re.match(r"(?!JSONDecodeError|UnicodeDecodeError)\w+(Error|Exception)\(", cooked.problem.detail)
        assert not unforeseen, f"a record is refused for no foreseen reason: {cooked.problem.detail}"
        return
    again = Conversation.from_record("key", json.loads(json.dumps(conversation.to_record())))
    assert again == conversation, "a record that was accepted differs after writing and reading"
    measure = _encoder().measure_pair if conversation.is_pair else _encoder().measure
    measure(conversation)


@functools.cache
def _encoder() -> Any:
    from energon_packing.config import EncoderConfig
    from energon_packing.demo import processor_path
    from energon_packing.encoders.encoder import ConversationEncoder

    return ConversationEncoder(EncoderConfig(processor=str(processor_path("qwen2_5_vl"))))


def _media_seeds(folder: Path) -> list[bytes]:
    import av
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    found = []
    frames = [Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)) for _ in range(3)]
    several = {"save_all": True, "append_images": frames}
    for form, options in (
        *(("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("GIF", {}), ("TIFF", {}), ("BMP", {})),
        *(("JPEG", {"progressive": True}), ("PNG", several), ("GIF", several), ("WEBP", several), ("MPO", several)),
        *(("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True}), ("JPEG2000", {}), ("ICO", {})),
    ):
        file = io.BytesIO()
        picture.save(file, form, **options)
        found.append(file.getvalue())
    # From libx264 on: codecs of which only the needed packets are decoded (`energon_packing.media.video`).
    for container, codec, given in (
        *(("avi", "mpeg4", {}), ("mp4", "mpeg4", {}), ("mpegts", "mpeg2video", {"bf": "2"})),
        *((box, "libx264", {"preset": "ultrafast", "bf": "2", "g": "3"}) for box in ("mp4", "matroska")),
        *((box, "libx265", {"preset": "ultrafast", "x265-params": "keyint=3:log-level=none"}) for box in ("mp4",)),
        *(("webm", "libvpx-vp9", {"g": "3"}), ("mp4", "libsvtav1", {"g": "3", "preset": "12"})),
    ):
        if codec not in av.codecs_available:
            continue
        file = io.BytesIO()
        with av.open(file, "w", format=container) as output:
            stream = output.add_stream(codec, rate=25 if codec == "mpeg2video" else 8, options=given)
            stream.width, stream.height, stream.pix_fmt = (64, 64, "yuv420p") if "av1" in codec else (32, 24, "yuv420p")
            for _ in range(8):
                pixels = rng.integers(0, 256, (stream.height, stream.width, 3), dtype=np.uint8)
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            output.mux(stream.encode(None))
        found.append(file.getvalue())
    return found


def _read_media(data: bytes, folder: Path) -> None:
    from energon_packing.errors import SampleRejected
    from energon_packing.media.image import decode_image, decode_scaled_image, is_plain
    from energon_packing.media.probe import image_info, probe_video
    from energon_packing.media.video import decode_frames

    is_plain(data)
    for read in (
        lambda: image_info(io.BytesIO(data), max_pixels=10**6),
        lambda: decode_image(data, max_pixels=10**6, max_bytes=10**7),
        lambda: decode_scaled_image(data, (6, 8), max_pixels=10**6, max_bytes=10**7),
        lambda: probe_video(io.BytesIO(data), max_pixels=10**6),
        lambda: decode_frames(data, [0, 3], max_pixels=10**6, max_bytes=10**7, deadline=time.monotonic() + 10),
    ):
        try:
            read()
        except SampleRejected:
            continue


def _tensor_seeds(folder: Path) -> list[bytes]:
    import numpy as np
    import torch
    from safetensors.torch import save

    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    files = [io.BytesIO(), io.BytesIO()]
    np.save(files[0], tensor.numpy())
    torch.save({"latent": tensor}, files[1])
    columns = io.BytesIO()
    np.save(columns, np.asfortranarray(tensor.numpy().astype(">f8")))
    return [
        *(b"npy " + each.getvalue() for each in (files[0], columns)),
        b"pt  " + files[1].getvalue(),
        b"safe" + save({"latent": tensor}),
        b"safe" + save({"latent": tensor.bfloat16(), "other": tensor.half()}),
    ]


def _read_tensor(data: bytes, folder: Path) -> None:
    from energon_packing.wan.tensor_files import read_tensor

    suffix = {b"npy ": "npy", b"pt  ": "pt"}.get(data[:4], "safetensors")
    read_tensor(data[4:], suffix, ("latent",))


def _state_seeds(folder: Path) -> list[bytes]:
    import itertools

    import torch

    from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
    from energon_packing.demo import processor_path
    from energon_packing.energon.loader import build_loader

    _record_seeds(folder)
    loader = build_loader(
        RunConfig(
            data=DataConfig(path=str(folder / "data"), workers=0),
            encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))),
            packing=PackingConfig(seq_length=2048, window=8, drop_budget=1.0),
        )
    )
    list(itertools.islice(loader, 2))
    torch.save({"dataloader_state_dict": {"packs": 2, "source": loader.save_state()}}, folder / "state.pt")
    return [(folder / "state.pt").read_bytes()]


def _read_state(data: bytes, folder: Path) -> None:
    from energon_packing.energon.states import read_state

    (folder / "state.pt").write_bytes(data)
    read_state(folder / "state.pt", missing="begin again.")


def _yaml_seeds(folder: Path) -> list[bytes]:
    return [
        b"data: {path: out/demo, workers: 2}\nencoder: {processor: p, limits: {max_tokens: 9, when_over: [drop]}}\n",
        b"packing:\n  seq_length: 8192\n  window: 256\n  policy: window\nparallel: &a {tensor_parallel: 2}\n",
        b"plan: {epochs: 3}\ntraining: {micro_batch_size: 1, global_batch_size: 32}\nencoder: {video_fps: 1.5e0}\n",
    ]


def _read_yaml(data: bytes, folder: Path) -> None:
    from energon_packing.config import load_config

    (folder / "run.yaml").write_bytes(data)
    load_config(folder / "run.yaml")


def _plan_seeds(folder: Path) -> list[bytes]:
    from energon_packing.config import EncoderConfig, PackingConfig, RunConfig
    from energon_packing.demo import processor_path
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.planner import make_plan

    _record_seeds(folder)
    run = RunConfig(
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl"))), packing=PackingConfig(seq_length=4096)
    )
    measure(MeasureConfig(paths=(folder / "data",), out=folder / "index", workers=0), run)
    make_plan((folder / "index",), run, folder / "plan.parquet")
    return [(folder / "plan.parquet").read_bytes()]


def _read_plan(data: bytes, folder: Path) -> None:
    from energon_packing.offline.plan import Plan

    (folder / "fuzzed.parquet").write_bytes(data)
    plan = Plan.open(folder / "fuzzed.parquet")
    list(plan.packs(0, min(len(plan), 50)))


TARGETS = {
    "records": Target(_record_seeds, _read_record, _rejected, json_changed),
    "media": Target(_media_seeds, _read_media, lambda: (), media_changed),
    "tensors": Target(_tensor_seeds, _read_tensor, _rejected, tensor_changed),
    "state": Target(_state_seeds, _read_state, _user_error, zip_changed),
    "yaml": Target(_yaml_seeds, _read_yaml, _user_error, yaml_changed),
    "plan": Target(_plan_seeds, _read_plan, _user_error, parquet_changed),
}


def check(target: Target, data: bytes, folder: Path) -> str | None:
    """Reads one input; returns what is wrong."""
    try:
        target.read(data, folder)
    except target.allowed():
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def in_child(target: Target, cases: Sequence[bytes], folder: Path, seconds: int) -> tuple[int, str] | None:
    """Reads inputs in a child process; returns the number of the first that is wrong, and what is wrong."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number, data in enumerate(cases):
            os.write(writing, f"{number}\n".encode())
            signal.alarm(seconds)
            if (wrong := check(target, data, folder)) is not None:
                os.write(writing, f"{number} {wrong}".replace("\n", " ").encode() + b"\n")
                os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        lines = stream.read().decode(errors="replace").splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    number, _, wrong = lines[-1].partition(" ")
    if code < 0:
        wrong = f"more than {seconds} s" if -code == signal.SIGALRM else f"crash: {signal.Signals(-code).name}"
    return int(number), wrong


def fuzz(target: Target, seeds: Sequence[bytes], folder: Path, *, cases: int, seed: int, seconds: int) -> Iterator[Any]:
    """Yields ``(input, what is wrong)`` for each found case among so many."""
    rng = random.Random(seed)
    made = [rng.choice((changed, target.change))(rng.choice(seeds), seeds, rng) for _ in range(cases)]
    while made and (found := in_child(target, made, folder, seconds)) is not None:
        yield made[found[0]], found[1]
        made = made[found[0] + 1 :]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one target for so many minutes."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz.py", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seconds", type=int, default=30, help="for one case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="where found cases are written")
    chosen = parser.parse_args(arguments)
    target = TARGETS[chosen.target]
    cases = 0
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as work:
        seeds = target.seeds(Path(work))
        for data in seeds:  # here, so that no child has imports to do
            target.read(data, Path(work))
        end = time.monotonic() + 60 * chosen.minutes
        while time.monotonic() < end:
            batch = fuzz(target, seeds, Path(work), cases=BATCH, seed=chosen.seed + cases, seconds=chosen.seconds)
            for data, wrong in batch:
                if wrong not in found:
                    place = chosen.corpus / chosen.target / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(data)
                    print(json.dumps({"target": chosen.target, "found": wrong, "case": str(place)}), flush=True)
                found[wrong] = found.get(wrong, 0) + 1
            cases += BATCH
    print(json.dumps({"target": chosen.target, "cases": cases, "found": len(found), "seed": chosen.seed}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
