"""`energon-packing plan` as a user sees it: summary, --diff, mistakes; and what `explain` says of a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.made_index import drawn_rows, made_index, row

from energon_packing.cli.main import cli
from energon_packing.offline.explain import explanation
from energon_packing.offline.plan import Plan, drops_path

SETTINGS = ("--set", "packing.seq_length=1024", "--set", "plan.max_data_parallel=4")


def plan(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, arguments)])


def explain(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["explain", *map(str, arguments)])


def result(*arguments: Any) -> Any:
    found = plan(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    rows = [*drawn_rows(200), row(2000), row(0, reason="bad_record")]
    return made_index(tmp_path / "index", {"a": [rows], "b": [drawn_rows(60, seed=1)]})


def test_the_summary_has_the_figures_of_the_plan(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.parquet"
    found = result(index, *SETTINGS, "--set", "plan.epochs=2", "--out", out)
    opened = Plan.open(out)
    lengths = [sample.length for pack in opened.packs(0, len(opened)) for sample in pack.samples]
    assert found["packs"] == len(opened)
    assert found["tokens"] == sum(lengths)
    assert found["fill"] == pytest.approx(sum(lengths) / len(opened) / 1024, abs=1e-5)
    assert found["of_bound"] > 0.95
    assert found["drops"] == {"bad_record": 1, "oversize": 1}
    assert sum(line["samples"] for line in found["histogram"]) == 260
    first, end = opened.facts.epoch_ends
    assert found["steps"]["8"] == [first // 8, end // 8 - first // 8]
    assert set(found["balance"]) == {"2", "4"}
    shown = plan(index, *SETTINGS, "--out", out, "--force")
    assert shown.exit_code == 0
    assert "dropped: bad_record 1, oversize 1" in shown.output
    (line,) = (line.split() for line in shown.output.splitlines() if line.lstrip().startswith("/data/b"))
    total = sum(sample.dataset == 1 for pack in opened.packs(0, len(opened)) for sample in pack.samples)
    assert line == ["/data/b", "60", f"{found['datasets'][1]['tokens']:,}", "1", "-", f"{total / 520:.2%}"]
    assert "Traceback" not in shown.output


def test_diff_counts_what_entered_left_and_moved(index: Path, tmp_path: Path) -> None:
    old, new, same = tmp_path / "old.parquet", tmp_path / "new.parquet", tmp_path / "same.parquet"
    result(index, *SETTINGS, "--out", old)
    result(index, *SETTINGS, "--out", same)
    result(
        index, *SETTINGS, "--set", "packing.seq_length=2048", "--set", "plan.datasets={b: {epochs: 0}}", "--out", new
    )
    assert result("--diff", old, same)["same"]
    found = result("--diff", old, new)
    assert (found["entered"], found["left"], found["moved"] + found["kept"]) == (1, 60, 200)
    assert found["decided"]["seq_length"] == {"before": 1024, "after": 2048}
    (entered,) = found["examples"]["entered"]
    assert entered["sample"] == "a-0-200"
    assert "a-0-200" in str(Plan.open(new).packs(entered["after"], entered["after"] + 1))
    assert all(each["sample"].startswith("b-") for each in found["examples"]["left"])
    places = {
        name: {sample.key: pack.number for pack in opened.packs(0, len(opened)) for sample in pack.samples}
        for name, opened in (("old", Plan.open(old)), ("new", Plan.open(new)))
    }
    moved = [key for key, pack in places["old"].items() if places["new"].get(key, pack) != pack]
    assert found["moved"] == len(moved)
    for each in found["examples"]["moved"]:
        assert (each["before"], each["after"]) == (places["old"][each["sample"]], places["new"][each["sample"]])
    assert "60 left" in plan("--diff", old, new).output


def test_diff_compares_repeated_samples_occurrence_by_occurrence(index: Path, tmp_path: Path) -> None:
    once, thrice = tmp_path / "once.parquet", tmp_path / "thrice.parquet"
    result(index, *SETTINGS, "--out", once)
    result(index, *SETTINGS, "--set", "plan.epochs=3", "--out", thrice)
    found = result("--diff", once, thrice)
    assert (found["entered"], found["left"], found["moved"], found["kept"]) == (520, 0, found["moved"], found["kept"])
    assert found["moved"] + found["kept"] == 260
    assert result("--diff", thrice, once)["left"] == 520


def test_explain_says_where_a_sample_is_and_beside_what_or_why_it_is_nowhere(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.parquet"
    result(index, *SETTINGS, "--set", "plan.epochs=2", "--out", out)
    opened = Plan.open(out)
    found = explanation(opened, "b-0-7")
    assert [each["epoch"] for each in found["packed"]] == [0, 1]
    for each in found["packed"]:
        (pack,) = opened.packs(each["pack"], each["pack"] + 1)
        names = [sample.name for sample in pack.samples]
        assert names[each["place"]] == "b-0-7"
        assert [other["sample"] for other in each["beside"]] == [name for name in names if name != "b-0-7"]
        assert each["pack_tokens"] == sum(sample.length for sample in pack.samples)
    (drop,) = explanation(opened, "a-0-200")["dropped"]
    assert (drop["reason"], drop["setting"]) == ("oversize", "packing.seq_length")
    missing = explain("nobody", out)
    assert missing.exit_code == 2
    assert "has no sample 'nobody'" in missing.output


def test_explain_tells_keys_with_a_number_sign_from_pieces(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.parquet"
    result(index, *SETTINGS, "--out", out)
    drops = drops_path(out)
    first = drops.read_text().splitlines()[0]
    named = ["x#1#0", "x#1", "x#one", "x"]
    entry = {"reason": "oversize", "detail": "", "dataset": "a", "shard": "shard_0.tar", "row": 0}
    drops.write_text("\n".join([first, *(json.dumps({"dropped": name, **entry}) for name in named)]) + "\n")
    found = {name: [each["dropped"] for each in explanation(Plan.open(out), name)["dropped"]] for name in named}
    assert found == {"x": ["x#1", "x"], "x#1": ["x#1#0", "x#1"], "x#1#0": ["x#1#0"], "x#one": ["x#one"]}
    for damage in ("[]", '{"dropped": 5}', "{"):
        drops.write_text(f"{first}\n{damage}\n")
        refused = explain("x", out)
        assert refused.exit_code == 2
        assert "the drops of the plan, cannot be read" in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["INDEX"], "Give --out"),
        (["none", "--out", "OUT"], "is not an index"),
        (["INDEX", "--out", "OUT", "--set", "plan.epoch=2"], "did you mean 'epochs'"),
        (["INDEX", "--out", "OUT", "--set", "packing.seq_length=1022", "--set", "parallel.context_parallel=4"], "1022"),
        (["--diff", "one.parquet"], "compares two plans, but 1"),
        (["--diff", "one.parquet", "two.parquet", "--out", "OUT"], "without --out"),
        (["--diff", "one.parquet", "two.parquet", "--from", "0"], "--extend, --from"),
        (["--diff", "one.parquet", "two.parquet", "--force"], "without --out, --force"),
        (["--diff", "one.parquet", "two.parquet", "--set", "plan.epochs=2"], "--config and --set"),
        (["--diff", "one.parquet", "two.parquet"], "There is no plan one.parquet"),
        (["INDEX", "--out", "OUT", "--set", "packing.oversize=raise"], "Sample a-0-200 has 2000 tokens"),
        (["INDEX", "--out", "OUT", "--set", "packing.seq_length=64"], "would be dropped"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    index: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"INDEX": str(index), "OUT": str(tmp_path / "plan.parquet")}
    settings = SETTINGS if "--out" in arguments and "--diff" not in arguments else ()
    found = plan(*settings, *(names.get(each, each) for each in arguments))
    assert found.exit_code == 2, found.output
    assert message in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "plan.parquet").exists()
