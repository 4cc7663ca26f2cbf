"""From JSON Lines with pairs, extra values, images and lists of frames to packs: nothing is parted or moved."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from energon_packing import thd
from energon_packing.config import DataConfig, EncoderConfig, PackingConfig, RunConfig
from energon_packing.conversation import Conversation, Turn
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import processor_path
from energon_packing.energon.loader import build_loader


def picture(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


@pytest.mark.parametrize("layout", ["polylithic", "monolithic"])
def test_pairs_and_extras_with_media_reach_the_packs_side_by_side_and_aligned(tmp_path, encoders, layout):
    images = [picture(tmp_path / f"{seed}.png", seed) for seed in range(3)]
    encoder = encoders["qwen2_5_vl"]

    def targets(answer):
        turns = (Turn(role="user", parts=("Q",)), Turn(role="assistant", parts=(answer,)))
        return encoder.measure(Conversation(key="k", turns=turns)).targets

    records, wanted = [], {}
    for at in range(12):
        good, bad, key = "Because " * (1 + at), "No " * (1 + 2 * at), f"k{at}"
        record = {"id": key}
        if at % 3 == 0:
            values = [0.5 + at + n for n in range(targets(good))]
            record |= {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": good}]}
            record["extras"] = {"logp": values}
            wanted[key] = values
        else:
            record |= {"conversations": [{"from": "human", "value": "<image><video>Q?"}], "images": [images[at % 3]]}
            record |= {"videos": [images], "chosen": {"from": "gpt", "value": good}, "rejected": bad}
            values = [100.0 * at + n for n in range(targets(good))]
            record["extras"] = {"logp": {"chosen": values, "rejected": -at}}
            wanted[f"{key}/chosen"], wanted[f"{key}/rejected"] = values, [-float(at)] * targets(bad)
        records.append(record)
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(map(json.dumps, records)) + "\n")
    report = convert(
        ConvertConfig(sources=(source,), out=tmp_path / "data", layout=layout, split={"train": 1}, workers=1)
    )
    assert (report.written, report.images, report.videos, report.media_files) == (12, 8, 8, 3)
    config = RunConfig(
        data=DataConfig(path=str(tmp_path / "data"), workers=0, repeat=False),
        encoder=EncoderConfig(processor=str(processor_path("qwen2_5_vl")), extra_fields=("logp", "preference")),
        packing=PackingConfig(seq_length=512, window=8, pairs="both"),
    )
    found = {}
    packs = list(build_loader(config))
    for pack in packs:
        keys = pack.batch.sample_keys
        for at, key in enumerate(keys):
            if key.endswith("/chosen"):
                assert keys[at + 1] == key.replace("/chosen", "/rejected")
        for key, row in zip(keys, thd.unpack(pack.batch), strict=True):
            assert key not in found
            learned = row["labels"] != -100
            found[key] = row["logp"][learned].tolist()
            sign = {"chosen": 1.0, "rejected": -1.0}.get(key.partition("/")[2], 0.0)
            assert set(row["preference"][learned].tolist()) == {sign}
            assert not row["logp"][~learned].any()
            visual = encoder.family.placeholder_ids
            for kind in ("image", "video"):
                assert bool((row["input_ids"] == visual[kind]).any()) == ("/" in key)
    assert len(packs) > 1
    assert found == wanted
