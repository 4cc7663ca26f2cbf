"""Data sets that ``energon prepare`` prepared, and what Energon's own loader reads in them."""

from __future__ import annotations

import json
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from file_makers import bridge_tar
from heard import Heard
from plain_readers import openai
from source_files import write_image

QUESTIONS = ("What is it?", "Which colour? \u2028", "\u732b\u5462\uff1f")


def prepared(folder: Path, sample_type: str, field_map: dict[str, str] | None = None) -> Path:
    """The directory after ``energon prepare``, with all samples in one split."""
    from click.testing import CliRunner
    from megatron.energon.tools.prepare import command

    words = ["--non-interactive", "--no-progress", "--num-workers", "1", "--split-ratio", "1,0,0"]
    words += ["--sample-type", sample_type]
    words += [] if field_map is None else ["--field-map", json.dumps(field_map)]
    done = CliRunner().invoke(command, [str(folder), *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return folder


def questions(folder: Path) -> Path:
    """A plain WebDataset of images with a question and an answer, prepared as `VQASample`."""
    import webdataset

    (folder / "vqa").mkdir()
    with webdataset.TarWriter(str(folder / "vqa/shard-0.tar")) as writer:
        for number, question in enumerate(QUESTIONS):
            image = write_image(folder / "x.jpg", 40 + number, seed=number).read_bytes()
            record = {"question": question, "answer": f"{number}."}
            writer.write({"__key__": f"v{number}", "json": record, "jpg": image})
    names = {"image": "jpg", "context": "json[question]", "answers": "json[answer]"}
    return prepared(folder / "vqa", "VQASample", names)


def chats(folder: Path) -> Path:
    """Bridge's ChatML with its pickled members, prepared as crude samples."""
    (folder / "chatml").mkdir()
    bridge_tar(folder).rename(folder / "chatml/shard-0.tar")
    return prepared(folder / "chatml", "CrudeWebdataset")


def by_energon(path: Path, **encoder: Any) -> Iterator[Any]:
    """The samples of a prepared data set in order, through Energon's loader."""
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

    own = type("Reader", (DefaultTaskEncoder,), encoder)
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(path, split_part="train", worker_config=workers, batch_size=None, task_encoder=own())
    yield from get_loader(dataset)


def read_questions(path: Path) -> list[Heard | None]:
    """Question and answer as Energon's `VQASample` has them, and the file whose pixels it has."""
    with tarfile.open(path / "shard-0.tar") as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    found: list[Heard | None] = []
    for sample in by_energon(path):
        said = [("user", f"<image>{sample.context}"), ("assistant", sample.answers)]
        found.append(Heard(said, media=[("image", files[f"{sample.__key__.rpartition('/')[2]}.jpg"])]))
    return found


def read_chats(path: Path) -> list[Heard | None]:
    """Turns and media of crude samples, unpickled by Python."""
    from megatron.energon import Cooker, Sample, basic_sample_keys, edataclass, stateless

    @edataclass
    class Parts(Sample):
        parts: dict[str, bytes]

    @stateless
    def cook(sample: dict[str, Any]) -> Parts:
        return Parts(**basic_sample_keys(sample), parts={name: sample[name] for name in ("json", "jpgs", "videos")})

    found: list[Heard | None] = []
    for sample in by_energon(path, cookers=[Cooker(cook)], decoder=None):
        media = [("image", content) for content in pickle.loads(sample.parts["jpgs"])]
        media += [("video", frames) for frames in pickle.loads(sample.parts["videos"])]
        found.append(Heard(openai({"conversations": json.loads(sample.parts["json"])}).said, media=media))
    return found
