"""What a reader of a page has before its first block: files of the names that the page uses.

Each is made once and linked into the directories of all pages that ask for it.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from manual import ROOT

CONVERSATIONS = 40


class Given:
    """Makes what pages ask for, in a folder of its own.

    Args:
        folder: where it is made; an empty directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}
        self._makers: dict[str, Callable[[], Path]] = {
            "chats.jsonl": self._chats,
            "images": self._images,
            "path/or/name": self._processor,
            "run.yaml": self._run,
            "data/packed": self._data,
            "clips": self._clip_files,
            "clips.jsonl": self._clips,
            "checkpoints": lambda: ROOT / "bridge_configs" / "hf",  # folders of the models' names
            **{name: lambda name=name: ROOT / name for name in ("scripts", "bridge_configs", "tests")},  # type: ignore[misc]
        }

    @property
    def names(self) -> tuple[str, ...]:
        """All that can be asked for."""
        return tuple(self._makers)

    def put(self, names: Iterable[str], into: Path) -> None:
        """Links what is asked for into a directory.

        Raises:
            KeyError: a name that is not in `names`.
        """
        for name in names:
            link = into / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(self._get(name))

    def _get(self, name: str) -> Path:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def _images(self) -> Path:
        """The directory that the paths in ``chats.jsonl`` begin in."""
        from energon_packing.demo import make_data

        return make_data(self.folder / "made", conversations=CONVERSATIONS, seed=7, defects=False)

    def _chats(self) -> Path:
        source, target = self._get("images"), self.folder / "chats.jsonl"
        records = [json.loads(line) for file in source.glob("*.jsonl") for line in file.read_text().splitlines()]
        records += [record for file in source.glob("*.json") for record in json.loads(file.read_text())]
        lines = [json.dumps(record | {"id": f"chat-{number}"}) for number, record in enumerate(records)]
        target.write_text("".join(f"{line}\n" for line in lines))
        return target

    def _processor(self) -> Path:
        from energon_packing.demo import processor_path

        return processor_path("qwen2_5_vl")

    def _run(self) -> Path:
        target = self.folder / "run.yaml"
        target.write_text(
            "data: {path: data/packed, workers: 1}\nencoder: {processor: path/or/name}\n"
            "packing: {seq_length: 2048, window: 16, drop_budget: 1.0}\n"
            "training: {global_batch_size: 64}\n"
        )
        return target

    def _data(self) -> Path:
        from energon_packing.convert import ConvertConfig, convert

        out = self.folder / "packed"
        sources, split = (self._get("chats.jsonl"),), {"train": 0.9, "val": 0.1}
        convert(ConvertConfig(sources=sources, media_root=self._get("images"), out=out, split=split, workers=0))
        return out

    def _clip_files(self) -> Path:
        """Latents and text embeddings of a few clips, and ``clips.jsonl`` beside the folder."""
        import numpy as np

        folder = self.folder / "clips"
        folder.mkdir()
        random = np.random.default_rng(0)
        rows = []
        for number in range(8):
            latents = random.standard_normal((16, 2 + number % 3, 8, 12)).astype(np.float32)
            context = random.standard_normal((4 + number, 4096)).astype(np.float32)
            np.save(folder / f"{number}.npy", latents)
            np.save(folder / f"{number}.text.npy", context)
            row = {
                "id": f"clip-{number}",
                "caption": "waves",
                "latents": f"{number}.npy",
                "context": f"{number}.text.npy",
            }
            rows.append(json.dumps(row))
        (self.folder / "clips.jsonl").write_text("\n".join(rows) + "\n")
        return folder

    def _clips(self) -> Path:
        return self._get("clips").with_name("clips.jsonl")
