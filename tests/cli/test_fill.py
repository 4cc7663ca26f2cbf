"""`energon-packing stats --fill`: policies and data-parallel steps on a user's own lengths."""

import io
import json

import numpy as np
import pytest
from click.testing import CliRunner

from energon_packing.cli.main import cli
from energon_packing.packing import pack_stream, policy_names
from energon_packing.packing.balance import pack_cost, simulate_steps

PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"a": 1}], dtype=object), allow_pickle=True)
LENGTHS = np.random.default_rng(0).integers(10, 900, 400)


def fill(*arguments):
    return CliRunner().invoke(cli, ["stats", "--fill", *map(str, arguments)])


def rows(*arguments):
    found = fill(*arguments, "--json")
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in found.stdout.splitlines()]


@pytest.fixture
def lists(tmp_path):
    """The same lengths in the three forms."""
    np.savez(tmp_path / "mine.npz", length=LENGTHS, images=LENGTHS % 7, capacity=2048)
    np.save(tmp_path / "a.b.npy", LENGTHS)
    (tmp_path / "mine.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    return tmp_path


def test_every_form_of_a_list_gives_the_same_packs_by_every_policy(lists):
    found = [
        [{name: row[name] for name in ("policy", "window", "packs", "fill", "bound")} for row in each]
        for each in (
            rows(lists / "mine.npz"),
            rows(lists / "a.b.npy", "--capacity", 2048),
            rows(lists / "mine.txt", "--capacity", 2048),
        )
    ]
    assert found[0] == found[1] == found[2]
    assert {row["policy"] for row in found[0]} == set(policy_names())
    for row in found[0]:
        assert row["packs"] >= row["bound"] == -(-int(LENGTHS.sum()) // 2048)
        assert row["fill"] == pytest.approx(LENGTHS.sum() / (row["packs"] * 2048))


def test_alignment_and_images_cost_packs_and_the_padding_is_told_apart(lists):
    (plain,) = rows(lists / "mine.npz", "--policy", "best_fit")
    (aligned,) = rows(lists / "mine.npz", "--policy", "best_fit", "--multiple", 64)
    (limited,) = rows(lists / "mine.npz", "--policy", "best_fit", "--image-limit", 6)
    padded = -(-LENGTHS // 64) * 64
    assert plain["alignment_padding"] == 0
    assert aligned["alignment_padding"] == pytest.approx((padded - LENGTHS).sum() / (aligned["packs"] * 2048))
    assert limited["bound"] == -(-int((LENGTHS % 7).sum()) // 6) > plain["packs"]


def test_samples_that_fit_no_pack_are_counted_not_hidden(lists):
    (found,) = rows(lists / "mine.txt", "--capacity", 500, "--policy", "best_fit")
    assert found["oversize"] == int((LENGTHS > 500).sum())
    assert found["samples"] + found["oversize"] == LENGTHS.size
    assert "samples are too large for any pack" in fill(lists / "mine.txt", "--capacity", 500).output


def test_sorting_by_cost_lets_ranks_wait_less(lists):
    by = {
        (row["ranks"], row["balance_window"]): row["efficiency"]
        for row in rows(lists / "mine.npz", "--ranks", 2, "--ranks", 8, "--balance-window", 16)
        if "ranks" in row
    }
    assert set(by) == {(2, 1), (2, 16), (8, 1), (8, 16)}
    assert by[8, 16] > by[8, 1]
    assert by[8, 1] < by[2, 1]


def test_steps_of_ranks_are_made_of_packs_within_the_limit_of_images(lists):
    """Fewer samples share a pack then, so that packs cost less and differ more."""
    options = ("--ranks", 8, "--balance-window", 16, "--image-limit", 6)
    found = {row["balance_window"]: row["efficiency"] for row in rows(lists / "mine.npz", *options) if "ranks" in row}
    limit = {"images": (lambda at: int(LENGTHS[at]) % 7, 6)}
    packs = pack_stream(range(400), 2048, length=lambda at: int(LENGTHS[at]), constraints=limit, window=256)
    costs = [pack_cost(LENGTHS[pack]) for pack in packs]
    for window, order in ((1, "none"), (16, "serpentine")):
        own = simulate_steps(costs, ranks=8, window=window, order=order)
        assert found[window] == pytest.approx(own.efficiency, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.txt", None, "There is no file"),
        ("bad.npz", b"no zip", "is not a list of lengths"),
        ("words.txt", b"12 twelve", "is not a list of lengths"),
        ("evil.npy", PICKLED.getvalue(), "is not a list of lengths"),
        ("zero.txt", b"12 0", "only positive whole numbers"),
        ("empty.txt", b"", "at least one length"),
        ("huge.txt", b"9" * 40, "is not a list of lengths"),
    ],
)
def test_a_file_that_is_no_list_is_told_in_a_sentence(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = fill(tmp_path / name, "--capacity", 512)
    assert (found.exit_code, told in found.output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "does not say how many tokens a pack holds"),
        (["--capacity", 100, "--multiple", 64], "not a multiple of 64"),
        (["--capacity", 5], "none of the 400 samples fits"),
        (["--capacity", 2048, "--image-limit", 4], "does not say how many images"),
        (["--capacity", 2048, "--policy", "windw"], "Did you mean 'window'"),
        (["--capacity", 2048, "--shift", 3], "--shift is about steps of ranks; give --ranks too"),
    ],
)
def test_settings_that_cannot_be_met_are_told_in_a_sentence(lists, arguments, told):
    found = fill(lists / "mine.txt", *arguments)
    assert (found.exit_code, told in " ".join(found.output.split())) == (2, True), found.output
