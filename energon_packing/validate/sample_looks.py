"""Looks at ten conversations of each data set: does the run's chat template show everything that they say?

They are read by Energon and measured by the run's own task encoder, in this process and without pixels, so that what is
refused here is what the ledger of the run would name.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.convert.layout import SUBFLAVORS, TEXT_TO_VIDEO_SUBFLAVORS
from energon_packing.errors import UserError
from energon_packing.validate.hub import offline
from energon_packing.validate.leaves import REMOTE, Leaf
from energon_packing.validate.look import Look, RefusedSample
from energon_packing.validate.shards import PREPARE_MEDIA, Inspected

SAMPLES = 10
"""Conversations of one data set."""
MOST_LEAVES = 20
"""Data sets of a blend whose conversations are read; each takes about a tenth of a second."""
_MARK = next(iter(SUBFLAVORS))


def look_at_samples(config: RunConfig, processor: Any, readable: list[tuple[Leaf, Inspected]], at: str) -> list[Look]:
    """One look a data set.

    Args:
        config: of the run.
        processor: loaded.
        readable: directories of shards of the training split, and what is known of them.
        at: setting and value of ``data.path``.
    """
    looks = []
    for leaf, found in readable[:MOST_LEAVES]:
        place = at if not leaf.named_in or len(readable) == 1 else f"{at}: {leaf.path}"
        why = _unreadable(leaf, found)
        if why:
            looks.append(Look(id="samples", at=place, outcome="not looked at", why=why))
        else:
            looks.append(_measured(config, processor, leaf, place))
    if len(readable) > MOST_LEAVES:
        why = f"{len(readable) - MOST_LEAVES} further data sets: only the first {MOST_LEAVES} are read"
        looks.append(Look(id="samples", at=at, outcome="not looked at", why=why))
    return looks


def _unreadable(leaf: Leaf, found: Inspected) -> str:
    """Why the records of a data set are left alone; empty where they are conversations of ours."""
    if leaf.joined:
        return f"{leaf.path} is one of several data sets that are joined into one sample"
    if any(REMOTE in address for address in leaf.aux.values()):
        return "its media are not on this machine"
    mark = found.subflavors.get(_MARK)
    if mark == TEXT_TO_VIDEO_SUBFLAVORS[_MARK]:
        return "it holds clips for text-to-video; only their paths were looked at"
    if mark != SUBFLAVORS[_MARK]:
        return (
            f"its records are not those of 'energon-packing convert' (no subflavor {_MARK}: {SUBFLAVORS[_MARK]}); "
            "only a cooker of your own reads them"
        )
    return ""


def _measured(config: RunConfig, processor: Any, leaf: Leaf, at: str) -> Look:
    """The look at the conversations of one data set."""
    refused: list[RefusedSample] = []
    number = 0
    try:
        with offline():
            for key, problem in _read(config, processor, leaf):
                number += 1
                if problem is None:
                    continue
                if problem.fatal is not None:
                    why = f"sample {key} stops the run: {' '.join(str(problem.fatal).split())}"
                    refused.append(RefusedSample(key=key, reason=problem.reason, detail=problem.detail))
                    return _error(at, why.rstrip("."), "change the setting that it names", number, refused)
                refused.append(RefusedSample(key=key, reason=problem.reason, detail=problem.detail))
    except ImportError as error:
        return Look(id="samples", at=at, outcome="not looked at", why=f"this needs Energon: {error}")
    except UserError as error:
        return _error(at, str(error).rstrip("."), "change the setting that it names", number, refused)
    except Exception as error:  # broken shards and indices make Energon raise all kinds
        reason = " ".join(str(error).split())[:300]
        why = f"Energon cannot read {leaf.path}: {type(error).__name__}: {reason}"
        return _error(at, why.rstrip("."), f"run 'energon prepare {leaf.path}' anew, or convert again", number, refused)
    return _judged(at, number, refused)


def _judged(at: str, number: int, refused: list[RefusedSample]) -> Look:
    """What the refusals say of the run."""
    counts = Counter(sample.reason for sample in refused)
    listed = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    if not number:
        return _error(at, "it gave no sample", "convert records into it", number, refused)
    by_template = [sample for sample in refused if is_of_the_template(sample.reason)]
    unmeasured = [sample for sample in refused if sample.reason == "unmeasured_media"]
    for kind, fix in (
        (by_template, "name a chat template that shows everything (encoder.chat_template), or change the records"),
        (unmeasured, PREPARE_MEDIA),
    ):
        if kind:
            first = kind[0]
            why = f"{len(kind)} of {number} conversations are refused ({listed}): {first.key}: {first.detail}"
            return _error(at, why.rstrip("."), fix, number, refused)
    if len(refused) == number:
        why = f"all {number} conversations are refused ({listed}): {refused[0].key}: {refused[0].detail}"
        return _error(
            at, why.rstrip("."), "change settings or records, so that some can be trained on", number, refused
        )
    if refused:
        why = f"{len(refused)} of {number} conversations would be dropped ({listed}), none for its template"
        return Look(
            id="samples", at=at, outcome="note", why=why, samples=number, refused=tuple(refused), fix="see 'preview'"
        )
    why = f"{number} conversations were measured, and none is refused"
    return Look(id="samples", at=at, outcome="ok", why=why, samples=number)


def is_of_the_template(reason: str) -> bool:
    """Whether a sample is refused for what the chat template makes of it: other samples will be, too."""
    return reason.startswith("template_") or reason == "unstable_prefix"


def _error(at: str, why: str, fix: str, samples: int, refused: list[RefusedSample]) -> Look:
    return Look(id="samples", at=at, outcome="error", why=why, fix=fix, samples=samples, refused=tuple(refused))


def _read(config: RunConfig, processor: Any, leaf: Leaf) -> Iterator[tuple[str, Any]]:
    """Key and problem (None where there is none) of the first conversations of one data set.

    A metadataset that refers to that directory alone is opened, so that media store and subflavors come along and a
    small data set of a blend is not left to chance.
    """
    from megatron.energon import get_loader

    from energon_packing.energon.loader import build_dataset
    from energon_packing.energon.task_encoder import PackingTaskEncoder

    class Measuring(PackingTaskEncoder):
        """Hands measured samples out instead of packing them."""

        def build_batch(self, dataset: Any, **_unused: Any) -> Any:
            """The data set of samples itself; called by Energon in place of batching."""
            return dataset

    # What is too long is dropped as the run drops it; how rows are aligned is the affair of the rules.
    packing = dataclasses.replace(config.packing, oversize="drop", ledger=None)
    encoder = Measuring(config.encoder, packing, ParallelConfig(), processor=processor)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.yaml"
        file.write_text(yaml.safe_dump(_metadataset(leaf), sort_keys=False, allow_unicode=True), encoding="utf-8")
        data = dataclasses.replace(
            config.data,
            path=str(file),
            split=leaf.split,
            workers=0,
            shuffle_buffer=1,
            shuffle_over_epochs=1,
            repeat=False,
            epoch_end="uneven",
        )
        once = dataclasses.replace(config, data=data, packing=packing, parallel=ParallelConfig())
        loader = get_loader(build_dataset(once, task_encoder=encoder, workers=0))
        for number, sample in enumerate(loader, 1):
            yield sample.__key__, sample.problem
            if number == SAMPLES:
                return


def _metadataset(leaf: Leaf) -> dict[str, Any]:
    """The metadataset of one directory."""
    reference: dict[str, Any] = {"path": leaf.path, "split_part": leaf.split}
    for name, usual in (("split_config", "split.yaml"), ("dataset_config", "dataset.yaml")):
        if getattr(leaf, name) != usual:
            reference[name] = getattr(leaf, name)
    if leaf.subflavors:
        reference["subflavors"] = dict(leaf.subflavors)
    if leaf.aux:
        reference["aux"] = dict(leaf.aux)
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {leaf.split: reference}}
