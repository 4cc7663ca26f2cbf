"""Benchmarks of packing: lists, packers to compare with, packs and steps under limits of tiles and tokens."""

import io
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from bench import packing, peers, tiles
from bench.balance import emission_order, run_two_costs, simulate_steps, turns
from bench.length_lists import LengthList, look_alike, omnibal_list, read_list
from forking_python import quick_python
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.errors import UserError
from energon_packing.packing import Constraints, lower_bound, pack_lengths

DOOR = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"
LENGTHS = np.random.default_rng(0).integers(10, 900, 400)
PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def door(*arguments):
    command = [quick_python(), str(DOOR), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(*arguments):
    done = door(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def lists(tmp_path):
    """The same lengths in every form."""
    np.savez(tmp_path / "mine.npz", length=LENGTHS, images=LENGTHS % 7, capacity=2048)
    np.save(tmp_path / "a.b.npy", LENGTHS)
    (tmp_path / "mine.txt").write_text("\n".join(map(str, LENGTHS)) + "\n")
    listed = [{"vit_num": n % 7, "token_num": n, "image_flags": n % 7} for n in LENGTHS.tolist()]
    (tmp_path / "ai2d_wh_token_lengths.json").write_text(json.dumps(listed, indent=4))
    return tmp_path


def test_every_form_of_a_list_gives_the_same_packs(lists):
    files = [lists / name for name in ("mine.npz", "a.b.npy", "mine.txt", "ai2d_wh_token_lengths.json")]
    found = rows("packing", "--lists", *files, "--capacity", 2048, "--policy", "best_fit", "--no-peers")
    assert len(found) == 4
    assert len({(row["packs"], row["bound"], row["fill_of_bound"]) for row in found}) == 1
    limited = rows(
        *("packing", "--lists", files[0], files[3], "--capacity", 2048, "--policy", "window", "--window", 64),
        *("--image-limit", 6, "--no-peers"),
    )
    assert limited[0]["bound"] == limited[1]["bound"] == -(-int((LENGTHS % 7).sum()) // 6)


def test_a_list_that_says_no_capacity_needs_one(lists):
    for name in ("packing", "balance"):
        done = door(name, "--lists", lists / "mine.txt", *["--no-peers"][: name == "packing"])
        assert (done.returncode, "give --capacity" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.txt", None, "There is no file"),
        ("bad.npz", b"no zip", "is not a list of lengths"),
        ("words.txt", b"12 twelve", "is not a list of lengths"),
        ("evil.npy", PICKLED.getvalue(), "is not a list of lengths"),
        ("other.json", b'{"a": 1}', "is not a list of lengths"),
        ("other.json", b"[]", "is not a list of lengths"),
        ("zero.txt", b"12 0", "only positive whole numbers"),
        ("empty.txt", b"", "at least one length"),
        ("huge.txt", b"9" * 40, "is not a list of lengths"),
    ],
)
def test_a_file_that_is_no_list_is_told_in_a_sentence(tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        read_list(tmp_path / name)


def test_the_lists_of_omnibal_are_read_as_one_and_what_a_copy_lacks_is_named(lists, capsys):
    (lists / "dvqa_wh_token_lengths.json").touch()
    (lists / "b_wh_token_lengths.json").write_text('[{"vit_num": 5, "token_num": 1341, "image_flags": 5}]')
    found = omnibal_list(lists)
    assert sorted(found.lengths.tolist()) == sorted([*LENGTHS.tolist(), 1341])
    assert found.images[found.lengths == 1341].tolist() == [5]
    assert all(images in (length % 7, 5) for length, images in zip(found.lengths, found.images, strict=True))
    assert "dvqa_wh_token_lengths.json is empty and left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="contains no"):
        omnibal_list(lists / "nowhere")


def test_the_look_alike_has_the_tiles_text_and_bounds_of_the_lists_that_it_is_like():
    """Counts of the four published lists, and the fewest packs of them under each pair of limits."""
    found = look_alike()
    text = found.lengths - 256 * found.images
    assert dict(zip(*np.unique(found.images, return_counts=True), strict=True)) == {1: 6387, 3: 23977, 4: 652, 5: 39690}
    assert (text.min(), np.median(text), text.max()) == (33, 89, 1258)
    bounds = (15_521, 11_641, 5_821, 16_058, 4_901, 15_521)
    for (most, capacity), bound in zip(tiles.LIMITS, bounds, strict=True):
        own = max(-(-int(found.images.sum()) // most), lower_bound(found.lengths, capacity))
        assert own == pytest.approx(bound, rel=0.002)
    again, other = look_alike(), look_alike(seed=1)
    assert (again.lengths == found.lengths).all()
    assert sorted(other.lengths) == sorted(found.lengths)
    assert (other.lengths != found.lengths).any()


@given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), max_size=30))))
@settings(max_examples=200)
def test_first_fit_places_each_sample_in_the_first_opened_pack_that_holds_it(problem):
    capacity, lengths = problem
    packs = []
    for index, length in enumerate(lengths):
        for pack in packs:
            if sum(lengths[other] for other in pack) + length <= capacity:
                pack.append(index)
                break
        else:
            packs.append([index])
    found = [group.tolist() for group in pack_lengths(lengths, capacity, peers.first_fit)]
    assert found == packs
    if find_spec("megatron.bridge") is not None:
        assert [[lengths[at] for at in pack] for pack in found] == peers.bridge_packer("first_fit")(lengths, capacity)


@pytest.mark.parametrize(
    ("samples", "images", "buffers", "packs"),
    [
        # Open: [0] with 2 images and 3 tokens in front of [1] with 1 image and 8 tokens; best fit would take [1].
        ([(3, 2), (8, 1), (2, 1)], 4, 20, [[0, 2], [1]]),
        # [1] has more images and stands in front of [0], although it came later; so sample 2 joins [1].
        ([(3, 1), (8, 2), (2, 1)], 4, 20, [[1, 2], [0]]),
        # A pack goes behind those with equally many images.
        ([(6, 2), (7, 2), (1, 1)], 4, 20, [[0, 2], [1]]),
        # Text counts as one image: two texts fill a limit of 2, so the third opens a new pack.
        ([(1, 0), (1, 0), (1, 0)], 2, 20, [[0, 1], [2]]),
        # Sample 1 completes the tokens of [0] at once; [2] leaves at the image limit, [3] at the end.
        ([(4, 1), (6, 1), (3, 4), (2, 1)], 4, 20, [[0, 1], [2], [3]]),
        # A pack at the image limit is emitted with tokens to spare.
        ([(9, 1), (3, 4), (1, 1)], 4, 20, [[1], [0, 2]]),
        # With too many open packs, the one with most images is emitted.
        ([(8, 1), (7, 3), (6, 2)], 4, 2, [[1], [2], [0]]),
        # A pack never exceeds its tokens, however many are open.
        ([(9, 1), (8, 1), (7, 1), (6, 1)], 4, 2, [[0], [1], [2], [3]]),
    ],
)
def test_each_rule_of_the_buffer_list_of_internvl(samples, images, buffers, packs):
    lengths, counts = zip(*samples, strict=True)
    found = pack_lengths(lengths, 10, peers.internvl, constraints={"images": (counts, images)}, window=buffers)
    assert [group.tolist() for group in found] == packs


def test_delay_counts_the_samples_that_came_in_between():
    # Sample 0 leaves with 3, so three came after it; 1 and 2 leave next, nothing newer has come than 3.
    figures = packing.figures([np.array([0, 3]), np.array([1, 2])], np.ones(4))
    assert (figures["delay_max"], figures["held"]) == (3, 4)
    in_order = packing.figures([np.array([0, 1]), np.array([2, 3])], np.ones(4))
    assert (in_order["delay_max"], in_order["held"]) == (1, 2)
    lengths = np.random.default_rng(2).integers(1, 500, 3000)
    assert packing.figures(pack_lengths(lengths, 2048, "window", window=64), lengths)["held"] <= 64


@pytest.mark.parametrize("order", ["none", "ascending", "serpentine"])
def test_every_pack_is_emitted_once_within_its_own_block_whatever_the_order(order):
    for window in (1, 2, 7, 64):
        found = emission_order(np.random.default_rng(0).random(100), window, order).tolist()
        assert sorted(found) == list(range(100))
        assert all(position // window == place // window for place, position in enumerate(found))
    assert emission_order(np.array([3, 1, 2, 3, 1, 2, 9]), 3).tolist() == [1, 2, 0, 3, 5, 4, 6]


@pytest.mark.parametrize("ranks", [8, 64])
def test_sorted_blocks_make_ranks_wait_less_also_when_they_are_shifted(ranks):
    costs = 24576.0 * 32768 + 32768.0**2 * np.random.default_rng(1).beta(0.6, 2.0, 5000)
    plain = simulate_steps(costs, ranks=ranks, window=1, order="none")
    sorted_ = simulate_steps(costs, ranks=ranks, window=64)
    shifted = simulate_steps(costs, ranks=ranks, window=64, max_shift=2)
    jumping = simulate_steps(costs, ranks=ranks, window=64, max_shift=2, order="ascending")
    assert 1 - sorted_.efficiency < 0.4 * (1 - plain.efficiency)
    assert shifted.efficiency > sorted_.efficiency - 0.01
    assert shifted.efficiency > jumping.efficiency
    assert sorted_.drift > plain.drift


def test_steps_under_two_limits_are_measured_as_omnibal_measures_them():
    """(max - mean) / max of each step, by hand; the rest of 8 packs is no step, and the end of a stream is its tail."""
    lengths, images = np.array([50, 50, 100] * 8), np.array([1, 3, 2] * 8)
    given = LengthList(name="mine", lengths=lengths, images=images, capacity=0)
    packs = [each for at in range(0, 24, 3) for each in (np.array([at, at + 1]), np.array([at + 2]))]
    found = tiles.figures(given, packs, 4, 100, window=6)
    assert (found["packs"], found["bound"], found["over"]) == (16, 16, 0.0)
    assert (found["steady"], found["tail"]) == (0.0, 0.0)
    assert (found["vision_8"], found["language_8"]) == (0.25, 0.0)
    assert (found["vision_64"], found["broken"]) == (None, 0)
    assert tiles.figures(given, packs, 3, 100)["broken"] == 8


DATASET = """
class BalancedDataset:
    def iter_random_groups(self, samples, seed, vit_thresh, vit_max, llm_thresh, llm_max, iter_time):
        print("searching")
        assert (vit_thresh, llm_thresh) == (vit_max, llm_max - 128) and iter_time == 50
        return [[sample] for sample in samples[:KEPT]]
"""


HASHBUCKET = """
class HashBucketProcessor:
    @classmethod
    def from_items(cls, items):
        made = cls()
        made.items = items
        return made

    def pack_best_fit_decreasing(self, box_capacity):
        return [{"name": [item["sample_id"]]} for item in self.items]
"""
BALANCE = """
from megatron.core import mpu
from loongforge.data.dp_balance.rebalance.pack import anything

def solve_sample_dp_reorder_plan(lengths, index, rank, cost_fn, pack_len_ratio, caller="VLM"):
    assert (caller == "ViT") == (pack_len_ratio is None)
    ranks = get_dp_group_by_device(lengths).size()
    total = sum(map(cost_fn, lengths.tolist()))
    return None, [total / 2, *[total / 2 / (ranks - 1)] * (ranks - 1)]
"""


def test_what_loongforge_moves_between_ranks_is_in_the_figures_of_its_steps(tmp_path):
    for name, text in (
        ("tools/data_preprocess/vlm/offline_packing/wds_pack/algorithms/hashbucket.py", HASHBUCKET),
        ("loongforge/data/dp_balance/rebalance/balance.py", BALANCE),
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    plain, moved = (tiles.other(name, tmp_path, look_alike(70), 18, 6016) for name in list(tiles.PROGRAMS)[1:])
    assert (len(plain[0]), plain[2]) == (70, {})
    assert moved[2] == {  # one rank has half of all, so others wait for most of the step; 70 packs are no step of 512
        f"{what}_{ranks}": pytest.approx(1 - 2 / ranks, abs=1e-5)
        for what in ("vision", "language")
        for ranks in (8, 64)
    }


def test_one_table_compares_packs_and_steps_and_names_what_is_skipped_or_loses_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiles, "LIMITS", ((18, 6016),))
    (tmp_path / "data" / "vision").mkdir(parents=True)
    listed = [{"vit_num": 1 + n % 5, "token_num": 256 * (1 + n % 5) + n} for n in range(40, 140)]
    (tmp_path / "data" / "vision" / "mine_wh_token_lengths.json").write_text(json.dumps(listed))
    (tmp_path / "dataset.py").write_text(DATASET.replace("KEPT", "None"))
    options = ["--tiles", "--samples", "300", "--window", "64", "--omnibal", str(tmp_path)]
    assert packing.main([*options, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    search = [(row["list"], row["packs"]) for row in found if row["packer"] == "OmniBal's search"]
    assert search == [("OmniBal", 100), ("look-alike", 300)], "a pack for each sample, as it says"
    for row in found:
        assert ("error" in row) == row["packer"].startswith("LoongForge")
        if "error" not in row:
            assert row["packs"] >= row["bound"]
            assert not row["broken"]
    (tmp_path / "dataset.py").write_text(DATASET.replace("KEPT", "90"))
    assert packing.main(options) == 0
    table = capsys.readouterr().out
    assert "OmniBal's search: it lost 10 samples" in table
    assert "LoongForge's best fit: skipped; --loongforge names its checkout" in table
    assert "| look-alike | 18 / 6,016 | `window` 64 held | " in table


def test_steps_in_the_order_of_two_costs_are_even_in_both():
    costs = np.random.default_rng(0).uniform(0.5, 1, (20_000, 2)) * [100, 3000]
    found = {(row["order"], row["ranks"]): row for row in run_two_costs([("made", costs)], ranks=(8, 64))}
    for ranks in (8, 64):
        none, one, two = (found[order, ranks] for order in ("none", "one cost", "two costs"))
        for name in ("vision", "language"):
            assert two[name] > 0.97 > one[name] > none[name]
            assert 1 - two[f"wait_{name}"] == pytest.approx(two[name], abs=0.01)
        assert two["sum_of_4"] >= two["sum"] > 0.97
        assert found["online, two costs", ranks]["vision"] > found["online", ranks]["vision"]
        assert found["online, two costs", ranks]["sum"] < found["online", ranks]["sum"]


def test_each_rank_turns_its_own_blocks_up_and_down():
    costs = np.array([[0, 3], [0, 9], [0, 1], [0, 2], [0, 5], [0, 8], [0, 7], [0, 4]])
    assert turns(costs, 2, 2, 1)[:, 1].tolist() == [3, 5, 9, 8, 2, 7, 1, 4]


@given(
    samples=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=8),
    most=st.integers(4, 8),
    capacity=st.integers(40, 80),
)
@settings(max_examples=200, deadline=None)
def test_no_packing_has_fewer_packs_than_the_bound_of_samples_that_leave_tiles_free(samples, most, capacity):
    images, lengths = np.array(samples).T
    sums = np.array([[images[[*part]].sum(), lengths[[*part]].sum()] for part in subsets(len(samples))])
    fits = [part for part, (tiles_of, tokens) in enumerate(sums) if tiles_of <= most and tokens <= capacity]
    fewest = [0] + [len(samples)] * (len(sums) - 1)
    for part in range(1, len(sums)):
        fewest[part] = min(1 + fewest[part ^ pack] for pack in fits if pack and pack & part == pack)
    assert tiles.tiles_bound(lengths, images, most, capacity) <= fewest[-1]


def subsets(count):
    """The members of each subset, by the bits of its number."""
    return [[at for at in range(count) if number >> at & 1] for number in range(1 << count)]


def test_samples_that_leave_tiles_free_need_more_packs_than_tiles_and_tokens_say():
    """Beside each of the first two nothing has room, so that one of its pack's four tiles stays free."""
    lengths, images = np.array([90, 90, 20, 20, 20, 20]), np.array([3, 3, 2, 2, 1, 1])
    assert lower_bound(lengths, 100, Constraints.from_pairs({"tiles": (images, 4)}, 6)) == 3
    assert tiles.tiles_bound(lengths, images, 4, 100) == 4
