"""Data sets of a blend with different ``group`` never share a pack, online as in a plan."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml

from energon_packing.config import RunConfig
from energon_packing.convert import ConvertConfig, convert
from energon_packing.convert.layout import dataset_entry
from energon_packing.energon.loader import build_loader, build_task_encoder
from energon_packing.energon.pack_bytes import field_digests
from energon_packing.energon.samples import by_group, group_name
from energon_packing.errors import ConfigError, PackingError


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Three data sets of texts; the keys of each begin with its letter."""
    root = tmp_path_factory.mktemp("groups")
    found = {}
    for letter in "abc":
        source = root / f"{letter}.jsonl"
        with source.open("w") as file:
            for number in range(60):
                answer = f"{letter} says {number}. " * (1 + (7 * number + ord(letter)) % 23)
                turns = [{"from": "human", "value": "Say it"}, {"from": "gpt", "value": answer}]
                file.write(json.dumps({"id": f"{letter}-{number}", "conversations": turns}) + "\n")
        convert(ConvertConfig(sources=(source,), out=root / letter, split={"train": 1.0}, workers=1))
        found[letter] = root / letter
    return found


@pytest.fixture
def blend(parts, tmp_path, run_config):
    """Makes the configuration of a run on the three data sets with these groups and weights."""

    def make(groups, weights=(4, 2, 1), workers=0, **packing) -> RunConfig:
        entries = []
        for letter, group, weight in zip("abc", groups, weights, strict=True):
            entry = {"weight": weight, "path": str(dataset_entry(str(parts[letter])))}
            entries.append(entry if group is None else entry | {"subflavors": {"group": group}})
        meta = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": entries}}}
        file = tmp_path / "blend.yaml"
        file.write_text(yaml.safe_dump(meta))
        data = {"path": str(file), "repeat": True, "workers": workers}
        return run_config(data=data, drop_budget=1.0, **({"seq_length": 1024, "window": 48} | packing))

    return make


def first(loader, count):
    return list(itertools.islice(loader, count))


def mixtures(packs):
    """The sets of data sets that packs consist of."""
    return {"".join(sorted({key[0] for key in pack.keys})) for pack in packs}


def test_packs_hold_samples_of_one_group_only_and_rare_groups_fill_theirs_as_well(blend):
    together = first(build_loader(blend((None, None, None))), 60)
    assert "abc" in mixtures(together)
    apart = first(build_loader(blend(("text", "charts", "charts"))), 60)
    assert mixtures(apart) <= {"a", "b", "c", "bc"}
    assert {"a", "bc"} <= mixtures(apart)
    fill = {
        name: [pack.batch.real_tokens / 1024 for pack in apart if (pack.keys[0][0] == "a") == (name == "a")]
        for name in ("a", "bc")
    }
    assert min(sum(shares) / len(shares) for shares in fill.values()) > 0.97
    # Shares of the blend stay: a group waits only until it holds as much as the other.
    tokens = {name: sum(shares) for name, shares in fill.items()}
    assert 0.35 < tokens["bc"] / tokens["a"] < 1.2


def test_data_sets_without_a_group_share_packs_with_each_other(blend):
    packs = first(build_loader(blend((None, "charts", None))), 60)
    assert mixtures(packs) <= {"a", "c", "ac", "b"}
    assert {"ac", "b"} <= mixtures(packs)


def test_disjoint_buffers_keep_groups_apart_too(blend):
    packs = first(build_loader(blend(("x", "y", "x")), packing_buffer_size=40), 30)
    assert mixtures(packs) <= {"a", "c", "ac", "b"}
    assert {"ac", "b"} <= mixtures(packs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_run_with_groups_goes_on_bit_for_bit(blend, workers):
    config = blend(("text", "charts", "rare"), workers=workers, balance_window=3)
    loader = build_loader(config)
    before = iter(loader)
    for _ in range(7):
        next(before)
    state = loader.save_state()
    expected = [(pack.keys, field_digests(pack.batch)) for pack in first(before, 15)]
    assert {keys[0][0] for keys, _ in expected} == {"a", "b", "c"}
    again = build_loader(config)
    again.restore_state(state)
    assert [(pack.keys, field_digests(pack.batch)) for pack in first(again, 15)] == expected


def test_a_selection_across_groups_stops_the_run(blend, monkeypatch):
    config = blend(("text", "charts", None))
    encoder = build_task_encoder(config)
    monkeypatch.setattr(encoder, "select_pack", lambda samples, ended: list(range(len(samples)))[:3])
    with pytest.raises(PackingError, match="of one group of data sets"):
        first(build_loader(config, task_encoder=encoder), 20)


def test_a_group_that_is_no_name_stops_the_run_in_a_sentence(blend):
    with pytest.raises(ConfigError, match=r"subflavors.group is \['charts'\]; it must be a name"):
        first(build_loader(blend((None, ["charts"], None))), 3)
    assert [group_name(each) for each in (None, {}, {"group": "a"}, {"group": 3})] == ["", "", "a", "3"]
    assert by_group([]) == {}


def test_a_plan_of_the_blend_has_the_same_groups(blend, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from energon_packing.offline.measure import MeasureConfig, measure
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    config = blend(("text", "charts", "text"))
    index, plan = tmp_path / "index", tmp_path / "plan.parquet"
    measure(MeasureConfig(paths=(tmp_path / "blend.yaml",), out=index, workers=0), config)
    make_plan([index], config, plan)
    packs = Plan.open(plan).packs(0, len(Plan.open(plan)))
    found = {"".join(sorted({sample.key[0] for sample in pack.samples})) for pack in packs}
    assert found <= {"a", "c", "ac", "b"}
    assert {"ac", "b"} <= found
