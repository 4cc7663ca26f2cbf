"""Looks at conversations from all over each data set: does the run's chat template render everything in them?

Energon reads them and the run's own task encoder measures them, in this process and without pixels. So a sample that
is refused here is one that the run's ledger would name.
"""

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from energon_packing.config import ParallelConfig, RunConfig
from energon_packing.convert.layout import META_DIRECTORY, SUBFLAVORS
from energon_packing.drops import DroppedSample, FrequentDrops
from energon_packing.errors import ConfigError, UserError
from energon_packing.sample_kind import kind_of_subflavors
from energon_packing.trust import check_data_set, trusting
from energon_packing.validate.looks.data import PREPARE_MEDIA, REMOTE, DataLooks, Leaf, Look, RefusedSample, mapping_in
from energon_packing.validate.run_facts import DataFacts, offline


def measuring_encoder(
    config: RunConfig, parallel: ParallelConfig, *, processor: Any = None, deals: bool = False
) -> Any:
    """Returns the run's task encoder, changed to yield measured samples instead of packing them. Samples that are too
    long are dropped, and no ledger is written. None as ``processor`` loads it. If it ``deals``, samples come in the
    places that a run's readers share out."""
    from energon_packing.energon.reader_shares import deal_samples
    from energon_packing.energon.task_encoder import PackingTaskEncoder

    class Measuring(PackingTaskEncoder):
        """Ends where packing begins."""

        def build_batch(self, dataset: Any, *, worker_config: Any, **_unused: Any) -> Any:
            """Returns the data set of samples itself; Energon calls it in place of batching."""
            if deals:
                deal_samples(dataset, worker_config)
            return dataset

    packing = dataclasses.replace(config.packing, oversize="drop", ledger=None)
    return Measuring(config.encoder, packing, parallel, processor=processor)


def measure_data(config: RunConfig, parallel: ParallelConfig, *, samples: int, one_a_row: bool = False) -> DataFacts:
    """Measures the first samples of the training split as the loader would, and packs them; ``one_a_row`` if the run
    reads single samples, where a preference pair cannot be two rows. Raises UserError: the data set or the processor
    cannot be used; ConfigError: none of the samples can be used."""
    from megatron.energon import get_loader

    from energon_packing.energon.loader import build_dataset
    from energon_packing.energon.sample_task_encoder import two_rows
    from energon_packing.packing.whole_list import pack_lengths

    encoder = measuring_encoder(config, parallel)
    once = dataclasses.replace(config, data=dataclasses.replace(config.data, repeat=False, workers=0))
    loader = get_loader(build_dataset(once, task_encoder=encoder, workers=0))
    packing = config.packing
    lengths, aligned, too_long = [], [], [0]
    number = 0
    for number, sample in enumerate(loader, 1):
        if sample.problem is not None and sample.problem.fatal is not None:
            raise sample.problem.fatal
        if sample.measured is not None:
            if one_a_row and len(sample.measured.segments) > 1:
                raise two_rows(sample.__key__)
            lengths.append(sample.measured.length)
            aligned.append(encoder.limits.aligned(sample.measured))
        elif sample.problem is not None and sample.problem.reason == "oversize":
            too_long.append(sample.problem.length or 0)
        if number >= samples:
            break
    if not lengths:
        raise ConfigError(f"None of the first {number} samples of {config.data.path} can be packed; see `preview`.")
    packs = pack_lengths(aligned, packing.seq_length, packing.policy, window=packing.window)
    return DataFacts(
        samples=len(loader),
        measured=number,
        dropped=number - len(lengths),
        too_long=len(too_long) - 1,
        longest=max(too_long + lengths),
        mean=sum(lengths) / len(lengths),
        fill=sum(lengths) / (len(packs) * packing.seq_length),
        packs=len(packs),
    )


SAMPLES = 200  # conversations read per data set, from places all over it that the run's seed chooses
SECONDS = 30.0  # after which no more are read of a data set that is slow to measure
MOST_PLACES = 200_000  # places that a data set is cut into: single conversations where it has no more of them
MOST_LEAVES = 20  # data sets of a blend whose conversations are read; each takes about a tenth of a second
_MARK = next(iter(SUBFLAVORS))


def look_at_samples(
    config: RunConfig, processor: Any, data: DataLooks, at: str, *, data_parallel: int = 1
) -> list[Look]:
    """One look per data set, for ``data_parallel`` ranks that read different samples; ``at`` is setting and value of
    ``data.path``."""
    left_alone = [_unreadable(leaf, found.subflavors) for leaf, found in data.readable]
    shares: list[str] = []
    try:
        from energon_packing.energon.loader import build_dataset
        from energon_packing.energon.reader_shares import dealt_shares

        with offline(), trusting(config.data.trust):
            for leaf, _ in data.readable:  # the run opens those that are left alone here, too
                for file in (Path(leaf.named_in), Path(leaf.path) / META_DIRECTORY / leaf.dataset_config):
                    if file.is_file():
                        check_data_set(str(file), file.read_bytes(), mapping_in(file))
            encoder = measuring_encoder(config, ParallelConfig(), processor=processor, deals=True)
            if data.whole and not any(left_alone):  # does Energon open it? It refuses a misspelt key of a blend, say
                dealt = dealt_shares(build_dataset(config, task_encoder=encoder, world_size=data_parallel))
                shares = [share.description for _, share in dealt]
    except ImportError as error:
        return [Look("samples", at, "not looked at", f"this needs Energon: {error}")]
    except UserError as error:
        return [_error(at, str(error), "change what it names")]
    except Exception as error:  # Energon's parser and its data set classes raise all kinds
        return [_error(at, f"Energon cannot open it: {_reason(error)}", "correct the metadataset")]
    looks = []
    for (leaf, found), why in zip(data.readable[:MOST_LEAVES], left_alone, strict=False):
        place = at if not leaf.named_in or len(data.readable) == 1 else f"{at}: {leaf.path}"
        unread = Look("samples", place, "not looked at", why)
        looks.append(unread if why else _measured(config, encoder, leaf, place, found.samples))
    if more := len(data.readable[MOST_LEAVES:]):
        why = f"{more} further data sets: only the first {MOST_LEAVES} are read"
        looks.append(Look("samples", at, "not looked at", why))
    if looks and shares:
        looks[0] = dataclasses.replace(looks[0], why="; ".join([looks[0].why, *shares[:MOST_LEAVES]]))
    return looks


def _unreadable(leaf: Leaf, subflavors: Mapping[str, Any]) -> str:
    """Why the records of a data set are left alone; empty where they are conversations of ours."""
    if leaf.joined:
        return f"{leaf.path} is one of several data sets that are joined into one sample"
    if any(REMOTE in address for address in leaf.aux.values()):
        return "its media are not on this machine"
    kind = kind_of_subflavors(subflavors)
    if kind is None:
        lacks = f"no subflavor {_MARK}: {SUBFLAVORS[_MARK]}"
        return f"its records are not those of 'energon-packing convert' ({lacks}); only a cooker of your own reads them"
    return f"it holds {kind.title}; only their paths were looked at" if kind.record_format else ""


def _measured(config: RunConfig, encoder: Any, leaf: Leaf, at: str, samples: int) -> Look:
    refused: list[RefusedSample] = []
    frequent = FrequentDrops("looked at")
    number, why, fix = 0, "", "change the setting that it names"
    try:
        with offline():
            for sample in _read(config, encoder, leaf, samples):
                key, problem = sample.__key__, sample.problem
                number += 1
                frequent.add({("", sample.modality): 1}, ())
                if problem is None:
                    continue
                told = {"key": key, "reason": problem.reason, "detail": problem.detail}
                frequent.add({}, [DroppedSample(**told, modality=sample.modality)])
                refused.append(RefusedSample(**told))
                if problem.fatal is not None:
                    why = f"sample {key} stops the run: {' '.join(str(problem.fatal).split())}"
                    break
    except UserError as error:
        why = str(error)
    except Exception as error:  # broken shards and indices make Energon raise all kinds
        why = f"Energon cannot read {leaf.path}: {_reason(error)}"
        fix = f"run 'energon prepare {leaf.path}' again, or convert again"
    return _error(at, why, fix, number, refused) if why else _judged(at, number, refused, frequent)


def _judged(at: str, number: int, refused: list[RefusedSample], frequent: FrequentDrops) -> Look:
    if not number:
        return _error(at, "it has no samples", "convert records into it", number, refused)
    listed = ", ".join(f"{count} {why}" for why, count in Counter(sample.reason for sample in refused).most_common())
    # Other samples will be refused for the same.
    by_template = [each for each in refused if each.reason.startswith("template_") or each.reason == "unstable_prefix"]
    unseen = [sample for sample in refused if sample.reason == "unsupported_media" and "family text" in sample.detail]
    for kind, fix in (
        (by_template, "name a chat template that shows everything (encoder.chat_template), or change the records"),
        ([sample for sample in refused if sample.reason == "unmeasured_media"], PREPARE_MEDIA),
        (unseen, "name the model's whole processor (encoder.processor): this one has no part for images and videos"),
    ):
        # A text model may leave out a few samples, and a template may refuse a few; what it omits, it omits always.
        rare = kind is unseen or all(sample.reason in ("template_error", "unstable_prefix") for sample in kind)
        if len(kind) > (number * 0.01 if rare else 0):
            why = f"{len(kind)} of {number} conversations are refused ({listed}): {kind[0].key}: {kind[0].detail}"
            return _error(at, why, fix, number, refused)
    if len(refused) == number:
        why = f"all {number} conversations are refused ({listed}): {refused[0].key}: {refused[0].detail}"
        return _error(at, why, "change settings or records so that some can be trained on", number, refused)
    if refused:
        for_its_template = "" if by_template else ", none for its template"
        why = f"{len(refused)} of {number} conversations would be dropped ({listed}){for_its_template}."
        why = " ".join([why, *frequent.news(final=True)])
        return dataclasses.replace(_error(at, why, "see 'preview'", number, refused), outcome="note")
    return Look("samples", at, "ok", f"{number} conversations were measured, and none is refused", samples=number)


def _error(at: str, why: str, fix: str, samples: int = 0, refused: Sequence[RefusedSample] = ()) -> Look:
    return Look("samples", at, "error", why.rstrip("."), fix, samples, tuple(refused))


def _read(config: RunConfig, encoder: Any, leaf: Leaf, samples: int) -> Iterator[Any]:
    """Conversations from all over one data set of so many, each a measured sample or one with a problem. Opens a
    metadataset of that directory alone, so that a small data set of a blend is not left to chance."""
    from megatron.energon import get_loader

    from energon_packing.energon.loader import build_dataset

    reference = {"path": leaf.path, "split_part": leaf.split, "subflavors": dict(leaf.subflavors)}
    reference |= {"split_config": leaf.split_config, "dataset_config": leaf.dataset_config}
    reference |= {"aux": dict(leaf.aux)} if leaf.aux else {}
    alone = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {leaf.split: reference}}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "one.yaml"
        file.write_text(yaml.safe_dump(alone, sort_keys=False, allow_unicode=True), encoding="utf-8")
        plain: dict[str, Any] = {"shuffle_buffer": 1, "shuffle_over_epochs": 1, "epoch_end": "uneven"}
        data = dataclasses.replace(config.data, path=str(file), split=leaf.split, workers=0, repeat=False, **plain)
        once = dataclasses.replace(config, data=data)
        places = build_dataset(once, task_encoder=encoder, workers=0, sequence=-(-samples // MOST_PLACES) or 1)
        deadline = None
        for number, sample in enumerate(get_loader(places), 1):
            yield sample
            deadline = deadline or time.monotonic() + SECONDS  # what the first imports is not the data's time
            if number == SAMPLES or time.monotonic() > deadline:
                return


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
