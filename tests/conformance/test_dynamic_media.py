"""Dynamic context parallelism with images: rows of 1, 2 and 4 ranks in one step train Qwen3-VL as static sizes do.

Bridge and Megatron-Core cannot do it yet. The patches in ``patches/`` name the versions that they are for; a scratch
copy gets them, and neither the installed packages nor a checkout changes. See `support.dynamic_vlm_ranks`.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import bridge_here  # noqa: F401
import pytest
import torch
from bridge_sources import installed_source, path_of_main
from support import dynamic_vlm_ranks
from support.multimodal_arguments import CHECKOUT as MEGATRON_LM

pytestmark = pytest.mark.timeout(900)
PATCHES = Path(__file__).with_name("patches")
PARTS = {
    "vision tower": r"vision_model\.(patch_embed|pos_embed|decoder\.layers)\.",
    "merger": r"vision_model\.merger\.",
    "deepstack": r"vision_model\.decoder\.deepstack_merger_list\.",
    "language model": r"language_model\.",
}


def case(dynamic=True, context=1, positions="model", cut="model", spread=False, bug=None, step="bridge"):
    return dict(locals())


STATIC = {size: case(dynamic=False, context=size) for size in (1, 2, 4)}
DYNAMIC = {
    "whole rows": case(),
    "whole rows, given positions": case(positions="three"),
    "whole rows, our step": case(step="ours"),
    "whole rows, images spread over the ranks of a row": case(spread=True),
    "rows that Megatron-Core cut": case(positions="three", cut="core"),
    "rows that Megatron-Core cut, images spread": case(positions="three", cut="core", spread=True),
}
BUGS = {
    "positions of one axis": case(positions="one", cut="core"),
    "rows of four ranks are cut for two": case(bug="rows of four ranks are cut for two"),
    "each rank takes the first embeddings": case(
        positions="three", cut="core", bug="each rank takes the first embeddings"
    ),
}


def patched(source, patch, scratch):
    """A copy of ``source``, a folder ``megatron/bridge`` or ``megatron/core``, as ``patch`` changes it."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed; it applies the patches")
    text = (PATCHES / patch).read_text()
    (where,) = set(re.findall(r"^diff --git a/((?:src/)?megatron/(?:bridge|core))/", text, re.MULTILINE))
    shutil.copytree(source, scratch / where)
    done = subprocess.run(
        ["git", "apply", str(PATCHES / patch)],
        cwd=scratch,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(scratch.parent)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"{patch} is for {text.partition(':')[0]}; check that out, or adapt the patch: {done.stderr}")
    return scratch / Path(where).parents[1]


@pytest.fixture(scope="module", params=["installed", "main"])
def results(request, tmp_path_factory):
    """Result of each case; static ones, and ``unpatched``, are those of the Bridge as it is."""
    folder = tmp_path_factory.mktemp("dynamic")
    if request.param == "main":
        path = path_of_main()
        if isinstance(path, str):
            pytest.skip(f"{path}; patches/bridge-main.patch names the commit that it is for")
        sources = (path[0] / "megatron" / "bridge", path[1] / "megatron" / "core")
        patch = "bridge-main.patch"
    else:
        import megatron.core

        bridge = installed_source()
        sources = (bridge.folder, Path(megatron.core.__file__).parent)
        path, patch = [], "bridge-0.6.2.patch"
        if bridge.version not in patch:
            pytest.skip(f"{patch} is not for Megatron-Bridge {bridge.version}; `pip install megatron-bridge==0.6.2`")
    copy = [patched(sources[0], patch, folder / "bridge"), patched(sources[1], "core.patch", folder / "core"), *path]
    plain = {f"static {size}": one for size, one in STATIC.items()} | {"unpatched": DYNAMIC["whole rows"]}
    changed = {**DYNAMIC, **BUGS, "patched static 2": STATIC[2]}
    return {
        **dict(zip(plain, dynamic_vlm_ranks.run_cases([*plain.values()], folder / "plain", path), strict=True)),
        **dict(zip(changed, dynamic_vlm_ranks.run_cases([*changed.values()], folder / "changed", copy), strict=True)),
    }


def largest_difference(ours, theirs):
    """Of each part of the model, that of any element of its gradient; all parts are there and have been trained."""
    assert set(ours["gradient"]) == set(theirs["gradient"])
    found = {}
    for part, names in PARTS.items():
        pairs = [(grad, theirs["gradient"][name]) for name, grad in ours["gradient"].items() if re.match(names, name)]
        assert max(float(theirs.abs().max()) for _, theirs in pairs) > 5e-3
        found[part] = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    assert sum(bool(re.match("|".join(PARTS.values()), name)) for name in ours["gradient"]) == len(ours["gradient"])
    return found


@pytest.mark.parametrize("size", STATIC)
@pytest.mark.parametrize("name", [*DYNAMIC, "patched static 2"])
def test_rows_of_one_two_and_four_ranks_in_one_step_train_as_rows_of_one_size(results, name, size):
    ours, theirs = results[name], results[f"static {size}"]
    differences = largest_difference(ours, theirs)
    print(f"{name}, static {size}: {differences}")
    assert ours["tokens"] == theirs["tokens"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize("bug", ["unpatched", *BUGS])
def test_what_the_patches_repair_and_what_might_break_again_changes_the_gradient(results, bug):
    differences = largest_difference(results[bug], results["static 1"])
    print(f"{bug}: {differences}")
    assert max(differences.values()) > 1e-3
    counts_twice = bug in ("unpatched", "rows of four ranks are cut for two")
    assert (results[bug]["tokens"] != results["static 1"]["tokens"]) == counts_twice


def test_rows_are_shared_by_one_two_and_four_ranks_and_images_by_several():
    from support.bridge_cpu.samples import Samples

    from energon_packing import thd

    assert sorted(set(dynamic_vlm_ranks.LOCAL_SIZES)) == [1, 2, 4]
    for number, size in enumerate(dynamic_vlm_ranks.LOCAL_SIZES):
        row = thd.assemble(dynamic_vlm_ranks.samples(number), multiple=thd.alignment_multiple(1, size, False))
        media = [
            int(torch.isin(part.tokens, torch.tensor([Samples.image, Samples.video])).sum())
            for part in (thd.slice_for_context_parallel(row, size, rank) for rank in range(size))
        ]
        if size == 4:
            assert min(media) > 0
        for ranks in range(dynamic_vlm_ranks.WORLD):
            assert sum(own[ranks] == number for own in dynamic_vlm_ranks.ROUNDS) in (0, 1)
        assert sum(number in own for own in dynamic_vlm_ranks.ROUNDS) == 1
        assert sum(own.count(number) for own in dynamic_vlm_ranks.ROUNDS) == size


@pytest.fixture(scope="module")
def megatron_lm():
    """The dev branch of Megatron-LM, whose batches come cut for the ranks that share them."""
    checkout = os.environ.get(MEGATRON_LM)
    if not checkout:
        pytest.skip(f"{MEGATRON_LM} names no checkout of Megatron-LM; patches/core-dev.patch names the commit")
    return Path(checkout)


@pytest.mark.parametrize("tensor", [1, 2])
def test_batches_of_megatron_cores_dev_branch_are_our_slices_with_positions_of_three_axes(
    megatron_lm, tmp_path, tensor
):
    copy = patched(megatron_lm / "megatron" / "core", "core-dev.patch", tmp_path / "core")
    shapes = dynamic_vlm_ranks.batch_shapes(tensor, tmp_path / "ranks", [copy, megatron_lm])
    assert [shape[:2] for shape in shapes] == [[3, 1]] * len(dynamic_vlm_ranks.LOCAL_SIZES)


def test_batches_of_megatron_cores_dev_branch_have_positions_of_one_axis_without_the_patch(megatron_lm, tmp_path):
    patched(megatron_lm / "megatron" / "core", "core-dev.patch", tmp_path / "core")
    with pytest.raises(RuntimeError, match="position_ids must be 1D before CP slicing, got 2D"):
        dynamic_vlm_ranks.batch_shapes(1, tmp_path / "ranks", [megatron_lm])
