"""An evaluation has the same samples each time, after each restart, on any number of ranks."""

import itertools
import json
import subprocess
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forking_python import quick_python
from support.ranks import ranks_environment

from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, PlanConfig, RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.demo import processor_path
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.errors import UserError
from energon_packing.ledger import DropBudgetExceeded, merged
from energon_packing.offline.measure import MeasureConfig, measure
from energon_packing.offline.open_loader import open_loader
from energon_packing.offline.pack import PackConfig, pack
from energon_packing.offline.planner import make_plan

SAMPLES, LONG = {"a": 60, "b": 24}, 3
"""Records of each data set; of them, those that fit no pack."""
BAD = 12
"""Records of each of two data sets of which none fits."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets of texts with all samples in the split ``val``, a plan and a packed directory of the first, and blends
    of two."""
    root = tmp_path_factory.mktemp("evaluated")
    for name, count in SAMPLES.items():
        converted(root, name, [at < LONG for at in range(count)])
    for name in ("c", "d"):
        converted(root, name, [True] * BAD)
    for name, kind, members in (
        ("both", "blend_epochized", SAMPLES),
        ("mix", "blend", SAMPLES),
        ("mixed_bad", "blend", ("c", "d")),
    ):
        entries: list[dict[str, Any]] = [{"path": str(dataset_entry(str(root / each)))} for each in members]
        if kind == "blend":
            entries = [{**entry, "weight": weight} for entry, weight in zip(entries, (3, 1), strict=True)]
        split = {kind: entries}
        values = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"val": split}}
        (root / f"{name}.yaml").write_text(yaml.safe_dump(values))
    run = replace(run_on(root / "a"), plan=PlanConfig(max_data_parallel=4))
    measure(MeasureConfig(paths=(root / "a",), split="val", out=root / "index", workers=0), run)
    make_plan([root / "index"], run, root / "plan.parquet")
    pack(PackConfig(plan=root / "plan.parquet", out=root / "packed", workers=0))
    return root


def converted(root: Path, name: str, long: list[bool]) -> Path:
    """A data set of texts, of which the long ones fit no pack."""
    lines = []
    for at, too_long in enumerate(long):
        answer = "word " * (2000 if too_long else 5 + at * 7 % 90)
        messages = [{"role": "user", "content": f"{at}?"}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"{name}{at}", "messages": messages}))
    (root / f"{name}.jsonl").write_text("\n".join(lines))
    given: dict[str, Any] = {"split": {"val": 1.0}, "samples_per_shard": 8, "workers": 0}
    convert(ConvertConfig(sources=(root / f"{name}.jsonl",), out=root / name, **given))
    return root / name


def run_on(path: Path, *, ledger: Path | None = None, **data: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(**{"path": str(path), "split": "val", "workers": 0, "shuffle_buffer": 10} | data),
        encoder=EncoderConfig(processor=str(processor_path("text"))),
        packing=PackingConfig(
            seq_length=512, window=16, drop_budget=1.0, ledger=None if ledger is None else str(ledger)
        ),
    )


def evaluations(
    run: RunConfig, packs: int, *, ranks: int = 1, times: int = 1, workers: int = 0
) -> list[list[list[Any]]]:
    """For each evaluation, its packs over all ranks in the order of steps: keys, and digests of their fields."""
    given: dict[str, Any] = {"world_size": ranks, "workers": workers, "evaluation": packs}
    streams = [iter(open_loader(run, rank=rank, **given)) for rank in range(ranks)]
    found = []
    for _ in range(times):
        steps = [[next(stream) for stream in streams] for _ in range(packs // ranks)]
        found.append([[made.keys, field_digests(made.batch)] for step in steps for made in step])
    return found


def records(folder: Path) -> set[str]:
    """Keys of the records in the shards of a data set."""
    names: set[str] = set()
    for file in folder.rglob("*.tar"):
        with tarfile.open(file) as shard:
            names |= {name.removesuffix(".json") for name in shard.getnames()}
    return names


def packable(*names: str) -> set[str]:
    return {key for name in names for key in (f"{name}{at}" for at in range(LONG, SAMPLES[name]))}


@pytest.mark.parametrize("way", ["a", "plan.parquet", "packed", "mix.yaml"])
def test_each_evaluation_has_the_same_packs_on_any_ranks_and_workers_and_after_a_restart(root: Path, way: str) -> None:
    run = run_on(root / way)
    first, second = evaluations(run, 8, times=2)
    assert len({key for keys, _ in first for key in keys}) > 20
    assert second == first
    # Of whatever is configured for the training's end of an epoch.
    assert evaluations(run_on(root / way, repeat=False, epoch_end="pad"), 8, ranks=2, workers=1) == [first]


def test_an_evaluation_goes_through_the_split_once_however_many_epochs_are_shuffled_together(root: Path) -> None:
    (packs,) = evaluations(run_on(root / "a", shuffle_over_epochs=3), 64)
    assert Counter(key for keys, _ in packs for key in keys) == dict.fromkeys(packable("a"), 1)


@pytest.mark.parametrize("way", ["a", "plan.parquet", "both.yaml"])
def test_an_evaluation_with_room_for_the_whole_split_has_each_sample_once_and_then_only_padding(
    root: Path, way: str
) -> None:
    expected = packable("a", "b") if way == "both.yaml" else packable("a")
    assert records(root / "a") >= packable("a")
    (packs,) = evaluations(run_on(root / way), 64, ranks=2)
    assert Counter(key for keys, _ in packs for key in keys) == dict.fromkeys(expected, 1)
    assert not any(keys for keys, _ in packs[-20:])
    loader = open_loader(run_on(root / way), evaluation=64, agree=lambda _: [True])  # of a loop of one's own
    made = list(itertools.islice(loader, 64))
    assert [pack.padding for pack in made] == sorted(pack.padding for pack in made)
    assert made[-1].batch.loss_mask.sum() == 0


def test_an_evaluation_of_a_blend_has_its_weights(root: Path) -> None:
    (packs,) = evaluations(run_on(root / "mix.yaml"), 40)
    counts = Counter(key[0] for keys, _ in packs for key in keys)
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.08)


def test_the_ledger_of_an_evaluation_names_each_dropped_sample_once_over_all_ranks(root: Path, tmp_path: Path) -> None:
    evaluations(run_on(root / "a", ledger=tmp_path), 64, ranks=2, times=2)
    report = merged(tmp_path)
    assert report.dropped == {"oversize": LONG}
    assert report.emitted == SAMPLES["a"] - LONG
    assert report.duplicates == []


def test_what_is_dropped_after_the_last_pack_of_an_evaluation_is_in_its_ledger_too(tmp_path: Path) -> None:
    run = run_on(
        converted(tmp_path, "e", [at % 8 == 7 for at in range(24)]), ledger=tmp_path / "ledger", shuffle_buffer=1
    )
    run = replace(run, packing=replace(run.packing, window=1))
    evaluations(run, 32, ranks=2, times=2)
    report = merged(tmp_path / "ledger")
    assert (report.emitted, report.dropped, report.duplicates) == (21, {"oversize": 3}, [])


@pytest.mark.parametrize(
    ("budget", "told", "way"),
    [
        (0.0, "drop_budget=0.0 allows", "c"),
        (1.0, "No sample of the evaluation's split can be packed", "c"),
        (1.0, "100 samples were dropped without a single pack", "mixed_bad.yaml"),
    ],
)
def test_an_evaluation_of_bad_data_is_refused_when_the_loader_is_built_and_never_searched_for_ever(
    root: Path, way: str, budget: float, told: str
) -> None:
    run = run_on(root / way)
    run = replace(run, packing=replace(run.packing, drop_budget=budget, max_drops_without_pack=100))
    with pytest.raises(UserError, match=told):
        open_loader(run, evaluation=8)


def test_a_split_that_ends_over_its_budget_is_refused_when_the_loader_is_built(tmp_path: Path) -> None:
    run = run_on(converted(tmp_path, "f", [at % 8 != 7 for at in range(200)]), shuffle_buffer=1)
    with pytest.raises(DropBudgetExceeded, match="175 of the 200 samples read were dropped"):
        open_loader(replace(run, packing=replace(run.packing, drop_budget=0.3)), evaluation=64)


def seen_by_ranks(folder: Path, packs: int, slow: float, patience: float, *paths: Path) -> list[dict[str, Any]]:
    """What each of two readers saw, see `evaluation_ranks`."""
    program = [quick_python(), "-W", "ignore", str(Path(__file__).with_name("evaluation_ranks.py"))]
    command = [*program, *map(str, (folder, packs, slow, patience, *paths))]
    ended = subprocess.run(command, env=ranks_environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_one_rank_measures_a_split_and_tells_the_others_who_wait_longer_than_a_collective_of_the_run(
    root: Path, tmp_path: Path
) -> None:
    found = seen_by_ranks(tmp_path, 8, 5.0, 4.0, root / "a", root / "a")
    assert [(each["error"], each["measured"]) for each in found] == [(None, 1), (None, 0)]
    (alone,) = evaluations(run_on(root / "a"), 8)
    assert [keys for pair in zip(*(each["keys"] for each in found), strict=True) for keys in pair] == [
        list(keys) for keys, _ in alone
    ]


def test_readers_with_different_copies_of_a_split_are_refused_together(root: Path, tmp_path: Path) -> None:
    other = converted(tmp_path, "a", [at < LONG for at in range(SAMPLES["a"] - 3)])
    for each in seen_by_ranks(tmp_path, 8, 0.0, 60.0, root / "a", other):
        assert "rank 1 has data set" in each["error"], each


def test_loaders_of_the_same_evaluation_are_alike_and_others_are_not(root: Path) -> None:
    first, again, longer = (open_loader(run_on(root / "a"), evaluation=packs).alike() for packs in (8, 8, 16))
    assert first == again
    assert {name for name in first if first[name] != longer[name]} == {"packs of the evaluation"}
