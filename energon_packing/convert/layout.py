"""The files of a converted data set, and what Energon needs to open it.

Polylithic (text and media apart)::

    DIR/dataset.yaml            MetadatasetV2: splits -> text, with the media store as auxiliary data set ``media``
    DIR/text/<split>-000000.tar members ``<key>.json``
    DIR/text/.nv-meta/
    DIR/media/media-000000.tar  members ``<media name>``, each file once
    DIR/media/.nv-meta/

Monolithic (one WebDataset)::

    DIR/<split>-000000.tar      members ``<key>.json``, ``<key>.<i>.<extension>``
    DIR/.nv-meta/

Both also hold `conversion.json`, `rejects.jsonl` and `warnings.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from energon_packing.convert.config import Layout
from energon_packing.errors import UserError
from energon_packing.sample_kind import kind_of_format

SUBFLAVORS = {"energon_packing": "v1"}
"""Marks every sample of a converted data set; cookers select samples by it."""

MEDIA_AUX = "media"
"""Name of the auxiliary data set that a cooker of a polylithic data set receives as keyword argument."""

TEXT_DIRECTORY = "text"
MEDIA_DIRECTORY = "media"
DATASET_FILE = "dataset.yaml"
META_DIRECTORY = ".nv-meta"
INFO_FILE = ".info.json"
LINT_FILE = "lint.yaml"
"""Describes the records to `energon info` and `energon lint`, whose ``--dataset-config`` takes it."""


def dataset_entry(path: str | Path) -> str:
    """The path of a data set to pass to `megatron.energon.get_train_dataset`.

    Args:
        path: a directory made by `convert`, any prepared Energon WebDataset, a metadataset YAML file, or the
            ``msc://`` address of one of them.

    Returns:
        ``DIR/dataset.yaml`` of a polylithic data set, the directory of a WebDataset, or the file itself.

    Raises:
        UserError: the path does not exist or is not a data set.
    """
    if "://" in str(path):
        from megatron.energon.epathlib import EPath

        place: Any = EPath(str(path))
    else:
        place = Path(path)
    if place.is_file():
        if place.name.endswith((".yaml", ".yml")):
            return str(path)
        raise UserError(f"{path} is a file, but not .yaml; name the directory that 'energon-packing convert' wrote")
    if (place / DATASET_FILE).is_file():
        return str(place / DATASET_FILE)
    if (place / META_DIRECTORY / INFO_FILE).is_file():
        return str(path)
    if not place.is_dir():
        raise UserError(f"{path} does not exist; name the directory that 'energon-packing convert' wrote")
    if (place / META_DIRECTORY).is_dir():
        raise UserError(f"{path} is only partly prepared (.nv-meta lacks {INFO_FILE}); run 'energon prepare {path}'")
    raise UserError(
        f"{path} is not a data set (it has neither {DATASET_FILE} nor {META_DIRECTORY}); make one with "
        "'energon-packing convert'"
    )


def subflavors_of(record_format: str) -> dict[str, str]:
    """The mark of the samples that a conversion with this format writes."""
    kind = kind_of_format(record_format)
    return dict(SUBFLAVORS if kind is None else kind.marks)


def write_metadataset(
    directory: Path, splits: Iterable[str], *, with_media: bool, subflavors: Mapping[str, str] = SUBFLAVORS
) -> None:
    """Writes ``dataset.yaml`` of a polylithic data set; its paths are relative, so the directory can be moved."""
    references = {}
    for split in splits:
        reference: dict[str, Any] = {"path": f"./{TEXT_DIRECTORY}", "split_part": split, "subflavors": dict(subflavors)}
        if with_media:
            reference["aux"] = {MEDIA_AUX: f"./{MEDIA_DIRECTORY}"}
        references[split] = reference
    content = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": references}
    (directory / DATASET_FILE).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def media_names(layout: Layout, names: list[str]) -> list[str]:
    """The names that a record stores for its media.

    Args:
        layout: polylithic records use the names of the media store as they are. Monolithic records use
            ``.<i>.<extension>``, to which Energon's `PrimaryFileStore` adds the sample's key; `i` counts the distinct
            files of the record.
        names: one per mention, ``<digest>.<extension>``.
    """
    if layout == "polylithic":
        return names
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return [f".{order[name]}.{name.rsplit('.', 1)[1]}" for name in names]
