"""The page of packs: to scale, closed to networks, and deaf to whatever samples say."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from headless import Browser, chromium
from pages import check_closed, data_of
from PIL import Image

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.config import EncoderConfig
from energon_packing.conversation import Conversation, Media, MediaPart, Turn
from energon_packing.demo import make_data, processor_path
from energon_packing.drops import DroppedSample
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.ledger import ChangedSample
from energon_packing.report.preview import (
    KINDS,
    PICTURES,
    TEXT,
    ShownMedia,
    Wanted,
    drawn_pack,
    picture,
    preview_page,
)

EVIL = "</script><script>window.owned=1;alert(1)</script><img src=x onerror=window.owned=2>"
KEY = f'"><svg onload="window.owned=3">{EVIL}'
BREAKERS = f"<!--<script>{EVIL} javascript:alert(4) \u2028 \x00 \ud800 \u202egpj.exe </title></style> ]]>"
ANSWER = "三只猫 😺👨‍👩‍👧 <b>done</b>"
WIDTH = 1024
NEEDS_BROWSER = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def encoder():
    return ConversationEncoder(EncoderConfig(processor=str(processor_path("qwen2_5_vl"))))


@pytest.fixture(scope="module")
def pack(encoder):
    """Two hostile samples, one with two adjacent images, in a row cut for two context-parallel ranks."""
    rows = []
    for key, sizes in ((KEY, [(90, 30), (56, 56)]), ("plain", [])):
        media = tuple(Media(kind="image", name=f"{EVIL}{at}.png", width=w, height=h) for at, (w, h) in enumerate(sizes))
        text = BREAKERS.replace("\ud800", "").replace("\x00", "")
        parts = (*(MediaPart(index=at) for at in range(len(media))), f"{text} How many cats?")
        turns = (Turn(role="user", parts=parts), Turn(role="assistant", parts=(ANSWER,)))
        measured = encoder.measure(Conversation(key=key, turns=turns, media=media))
        rows.append(encoder.render(measured, lambda name, sizes=sizes: png(*sizes[int(name[-5])])))
        rows[-1]["key"] = key
    return SimpleNamespace(
        batch=thd.assemble(rows, multiple=4, width=WIDTH),
        index=0,
        keys=(KEY, "plain"),
        dropped=(DroppedSample(key=KEY, reason=EVIL, detail=BREAKERS),),
        changed=(ChangedSample(key=KEY, how=EVIL, detail=BREAKERS),),
    )


def png(width, height):
    data = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 90, dtype=np.uint8)).save(data, "PNG")
    return data.getvalue()


@pytest.fixture(scope="module")
def drawn(pack, encoder):
    thumb = picture(torch.full((3, 40, 200), 128, dtype=torch.uint8))
    kinds = encoder.family.visual_kinds(pack.batch.tokens[0].numpy())
    total = int((kinds > 0).sum())
    first = 3  # a 90x30 image becomes 84x28: three merged patches
    shown = (
        ShownMedia(name=EVIL, label=f"image {EVIL}", tokens=first, pictures=(thumb,)),
        ShownMedia(name="b.png", label="second", tokens=total - first, pictures=("javascript:alert(5)",)),
    )
    return drawn_pack(
        pack,
        encoder.family,
        {"seq_length": WIDTH, "context_parallel": 2},
        media={KEY: shown},
        sources=(EVIL, "shard_0.tar, sample 3", ""),
    )


@pytest.fixture(scope="module")
def page(drawn):
    return preview_page([drawn] * 3, {"path": EVIL, "seq_length": WIDTH, "multiple": 4, "context_parallel": 2})


def test_runs_and_padding_cover_the_row_and_are_what_the_batch_holds(pack, drawn, encoder):
    batch = pack.batch
    kinds = encoder.family.visual_kinds(batch.tokens[0].numpy())
    weights = batch.loss_mask[0].numpy()
    at = 0
    for segment in drawn["segments"]:
        assert segment["start"] == at
        assert sum(width for _, width in segment["runs"]) == segment["tokens"]
        for kind, width in segment["runs"]:
            own = kinds[at : at + width]
            assert ((own == 1) == (KINDS[kind] == "image")).all()
            if KINDS[kind] in ("text", "trained"):
                assert ((weights[at - 1 : at + width - 1] > 0) == (KINDS[kind] == "trained")).all() or at == 0
            at += width
        assert batch.padding_mask[0, at : at + segment["padding"]].all()
        at += segment["padding"]
    assert at == WIDTH == drawn["tokens"]
    assert [segment["kind"] for segment in drawn["segments"]] == ["sample", "sample", "tail"]


def test_slices_are_those_of_the_ranks(pack, drawn):
    for rank in range(2):
        own = [
            position
            for segment in drawn["segments"]
            for number, start, stop in segment["slices"]
            if number == rank
            for position in range(start, stop)
        ]
        assert own == sorted(thd.context_parallel_indices(pack.batch.boundaries, 2, rank).tolist())


def test_pictures_stand_where_their_placeholders_do(drawn):
    pieces = drawn["segments"][0]["pieces"]
    assert [piece[0] for piece in pieces if len(piece) == 1] == [0, 1]
    texts = [piece[0] if len(piece) == 2 else f"<{piece[0]}>" for piece in pieces]
    whole = "".join(texts)
    assert whole.index("<0>") < whole.index("<1>") < whole.index("How many cats?") < whole.index(ANSWER)
    (answer,) = (piece for piece in pieces if len(piece) == 2 and ANSWER in piece[0])
    assert answer[1] == 1, "the answer is trained"


def test_nothing_that_a_sample_says_is_markup(page):
    found = check_closed(page)
    scripts = [(attributes, text) for name, attributes, text in found.inside if name == "script"]
    assert [attributes.get("type") for attributes, _ in scripts] == ["application/gzip", None]
    assert data_of(page)["packs"][0]["segments"][0]["key"] == KEY, "it is there, as data"
    assert not any(attributes.get("onload") or attributes.get("onerror") for _, attributes in found.elements)
    assert "img" not in found.names(), "pictures are made by the script"
    assert EVIL in found.text, "the path is shown, as text"


def test_a_thousand_packs_stay_small(drawn):
    """Each of 8 samples with four turns of as much Chinese text as it may have, and pictures up to their limit."""
    text = ["猫" * (TEXT // 8_000 // 4), 1]
    runs = [[0, 100], [1, 100], [2, 400]] * 4
    segment = {**drawn["segments"][1], "key": "k" * 20, "name": "k" * 20, "pieces": [text] * 4, "runs": runs}
    pack = {**drawn, "dropped": [], "changed": [], "segments": [segment] * 8}
    facts = {"path": "x", "seq_length": WIDTH, "multiple": 4, "context_parallel": 2}
    size = len(preview_page([pack] * 2, facts).encode()) - len(preview_page([pack], facts).encode())
    assert 1000 * size + PICTURES < 15e6


@pytest.fixture(scope="module")
def dataset(demo_data):
    return demo_data(16)


def preview(dataset, *arguments):
    settings = (f"encoder.processor={processor_path('qwen2_5_vl')}", "packing.seq_length=4096", "packing.window=8")
    options = [part for setting in settings for part in ("--set", setting)]
    return CliRunner().invoke(cli, ["preview", str(dataset), *options, *map(str, arguments)])


def shown_by(path):
    check_closed(path.read_text())
    return data_of(path.read_text())


@pytest.mark.parametrize(
    ("key", "holds"), [("a#12", True), ("a/rejected", True), ("b/a", False), ("a#b", False), ("a/0001", False)]
)
def test_a_sample_is_found_by_its_pieces_and_answers_and_not_by_what_its_key_begins_with(key, holds):
    pack = SimpleNamespace(keys=(key,), batch=SimpleNamespace(sample_keys=()))
    assert (Wanted(packs=1, key="a").holds(pack), Wanted(packs=1, key=key).holds(pack)) == (holds, True)


def test_one_pass_of_the_data_is_shown_and_no_sample_of_it_again(dataset):
    packs = json.loads(preview(dataset, "--packs", 500, "--text-width", 0, "--json").stdout)["packs"]
    keys = [segment["key"] for pack in packs for segment in pack["segments"] if segment["key"]]
    assert 0 < len(packs) < 500
    assert len(set(keys)) == len(keys)
    ends = ["--set", "data.repeat=false", "--set", "data.epoch_end=drop"]  # which ends with whole steps of all ranks
    assert json.loads(preview(dataset, "--packs", 500, "--text-width", 0, "--json", *ends).stdout)["packs"] == packs


def test_the_command_writes_real_packs_with_pictures_and_places(dataset, tmp_path):
    file = tmp_path / "packs.html"
    done = preview(dataset, "--html", file, "--packs", 2, "--set", f"packing.ledger={tmp_path / 'ledger'}")
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "ledger").exists(), "the ledger is that of a run, which may be alive"
    shown = shown_by(file)
    packs = shown["packs"]
    assert all(source.startswith("data:image/jpeg;base64,") for source in shown["pictures"])
    assert len(set(shown["pictures"])) == len(shown["pictures"]), "each is there once"
    listed = json.loads(preview(dataset, "--packs", 2, "--json").stdout)["packs"]
    assert [[segment["key"] for segment in pack["segments"]] for pack in packs] == [
        [segment["key"] for segment in pack["segments"]] for pack in listed
    ]
    samples = [segment for pack in packs for segment in pack["segments"]]
    media = [each for segment in samples for each in segment["media"]]
    assert media
    assert all(each["pictures"] for each in media)
    assert all("sample" in segment["source"] and ".tar" in segment["source"] for segment in samples)
    key = packs[1]["segments"][0]["key"]
    by_key = preview(dataset, "--html", file, "--packs", 1, "--key", key)
    assert by_key.exit_code == 0, by_key.output
    assert all(key in [segment["key"] for segment in pack["segments"]] for pack in shown_by(file)["packs"])
    later = json.loads(preview(dataset, "--packs", 1, "--pack", 1, "--json").stdout)["packs"]
    assert later == listed[1:]
    beyond = preview(dataset, "--set", "data.repeat=false", "--pack", 999)
    assert (beyond.exit_code, "ends before pack 999" in beyond.output) == (2, True)
    nothing = preview(dataset, "--key", "nobody")
    assert (nothing.exit_code, "energon-packing explain nobody" in nothing.output) == (2, True)


@pytest.mark.full
@NEEDS_BROWSER
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_opens_and_closes_packs_and_runs_nothing_of_the_data(page, tmp_path, dark):
    file = tmp_path / "packs.html"
    file.write_text(page, encoding="utf-8")
    with Browser(dark=dark) as browser:
        browser.open(file)
        browser.wait("document.querySelectorAll('.row button').length === 9")
        names = browser.evaluate("[...document.querySelectorAll('.row button')].map(b => b.getAttribute('aria-label'))")
        assert all(", " in name and "token" in name for name in names)
        share = browser.evaluate(
            "document.querySelector('.row button').getBoundingClientRect().width /"
            " document.querySelector('.row').getBoundingClientRect().width"
        )
        first = data_of(page)["packs"][0]["segments"][0]
        assert share == pytest.approx((first["tokens"] + first["padding"]) / WIDTH, abs=0.01), "to scale"
        browser.evaluate("document.querySelector('.row button').focus()")
        browser.press("Enter")
        browser.wait("document.querySelector('.detail')")
        text = browser.evaluate("document.querySelector('.detail').textContent")
        for part in (KEY, "CP rank 1", "cu_seqlens", ANSWER, "alignment to a multiple of 4"):
            assert part in text
        assert browser.evaluate("document.querySelector('.turns mark').textContent").startswith(ANSWER)
        browser.wait("document.querySelector('.turns img').complete")
        assert browser.evaluate("document.querySelector('.turns img').naturalWidth") == 112
        assert browser.evaluate("document.querySelectorAll('.turns img').length") == 1, "scripts are no pictures"
        assert browser.evaluate("document.querySelectorAll('b, .detail svg, img[src=x]').length") == 0
        browser.press("ArrowRight")
        assert browser.evaluate("document.activeElement.getAttribute('aria-label')") == names[1]
        browser.press("ArrowDown")
        assert browser.evaluate("document.activeElement.closest('.pack').dataset.pack") == "1"
        browser.press("ArrowUp")
        browser.press("Escape")
        assert browser.evaluate("document.querySelectorAll('.detail').length") == 0
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
        assert browser.evaluate("window.owned === undefined")
        assert browser.problems == []
        assert all(address.startswith(("file:", "data:image/jpeg")) for address in browser.requests)


def test_a_plan_and_its_packs_have_a_page(tmp_path):
    def run(*words):
        found = CliRunner().invoke(cli, [*map(str, words)])
        assert found.exit_code == 0, found.output

    images = make_data(tmp_path / "demo", conversations=12, seed=3, defects=False)
    data, index, plan, packed = (tmp_path / name for name in ("data", "index", "plan.parquet", "packed"))
    processor = f"encoder: {{processor: {json.dumps(str(processor_path('qwen2_5_vl')))}}}\n"
    (tmp_path / "run.yaml").write_text(processor + "packing: {seq_length: 4096}\n")
    given = ["--config", tmp_path / "run.yaml"]
    sources = sorted(images.glob("*.json*"))
    run("convert", *sources, "--media-root", images, "--out", data, "--workers", 0)
    run("measure", data, "--out", index, "--workers", 0, *given)
    run("plan", index, "--out", plan, *given)
    run("pack", plan, "--out", packed, "--workers", 0)
    for path in (plan, packed):
        run("preview", path, "--html", tmp_path / "page.html", "--packs", 1, *given)
        check_closed((tmp_path / "page.html").read_text())
