#!/usr/bin/env python
"""Makes the processor directories that the package ships: tokenizer, chat template, image and video settings.

The tokenizer is a byte-level BPE trained on text from the demo's own generators, so nothing is downloaded. Running the
script again writes the same bytes with the same version of the `tokenizers` package (`tests/demo` compares them).

    python scripts/train_demo_tokenizer.py            # writes energon_packing/demo/processors
    python scripts/train_demo_tokenizer.py --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout without installation

from energon_packing.demo import prose, scenes, words  # noqa: E402

VOCABULARY = 4096  # tokens, special ones included: a multiple of 128, so a tiny model needs no padded embedding
TEXTS = 4000
PIXELS = 28 * 28
PIXELS_3 = 32 * 32

# In the id order of Qwen's own tokenizers; True marks tokens that `skip_special_tokens` removes.
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

# Qwen2's pre-tokenizer: contractions, words with a leading mark, single digits, punctuation, line breaks, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Frequent English words, so that text other than the demo's does not fall apart into bytes.
COMMON = """
about above across after again against all almost along already also although always among and another any anyone
anything are around as ask at away back be became because been before began behind being believe below best better
between big both bring build but buy by call came can cannot change city clear close cold come common complete could
country course current day did different does done down during each early easy either end enough even ever every
example eyes face fact family far fast few field figure find first follow following food for form found four free
friend from full gave general get give go going good great group grow had half hand hard has have he head hear help
her here high him his history hold home hour house how however human idea if important in include increase information
interest into is it its itself job just keep kind knew know known land language large last late later learn least
leave left less let letter life light like line list little live local long look lost lot love low made main make man
many matter may me mean might mind minute model moment money month more morning most mother move much must my name
near need never new next night no not nothing now number of off often old on once one only open or order other our out
over own page paper part party past pay people perhaps person picture place plan play point possible power present
problem process program public question quickly quite rather read ready real really reason recent remember report rest
result right road room run said same saw say school second see seem sense sentence set several shall she short should
show side simple since small so some someone something sometimes soon sound special stand start state still stop story
street strong student study such sure system table take talk teach tell than that the their them then there these they
thing think third this those though thought three through time to today together told too took toward town tree true
try turn two type under understand until up upon us use used usually value very video view voice wait walk want was
watch water way we week well went were what when where whether which while white who whole whose why will with within
without woman wonder word work world would write year yes yet you young your thank please sorry sure answer image
photo scene background foreground person people wearing standing sitting holding looking smiling playing team game
player sport football baby glasses book reading funny cute celebrate request response function arguments parameters
description string integer boolean array object required properties type default error message status result data file
user assistant system content role tools search convert calculate generate email weather temperature currency exchange
rate amount distance location recipe movie restaurant schedule reminder
"""


def training_text() -> Iterator[str]:
    """Yields texts of every kind in the demo's conversations, drawn with a fixed seed."""
    rng = Random("demo tokenizer")
    topics = list(prose.TOPICS.values())
    yield from words.TOWN_HEADS
    for index in range(TEXTS):
        yield "\n".join(rng.choice(topics)(rng))
        if index % 8 == 0:
            yield "\n".join(prose.story(rng, rng.randint(200, 1500)))
            text, exchanges = prose.logbook(rng, rng.randint(200, 800))
            yield "\n".join((text, *map("\n".join, exchanges)))
            text, exchanges = prose.stock_list(rng, rng.randint(3, 12))
            yield "\n".join((text, *map("\n".join, exchanges)))
        if index % 4 == 0:
            yield "\n".join(map("\n".join, scenes.draw_picture(rng).exchanges(rng)))
            yield "\n".join(map("\n".join, scenes.draw_clip(rng).exchanges(rng)))
            call = {
                "name": "get_" + rng.choice(words.GOODS),
                "arguments": {rng.choice(words.GOODS): rng.randint(1, 99)},
            }
            yield json.dumps(call)
    for _ in range(4):
        yield from (f" {word} {word.capitalize()}" for word in COMMON.split())


def train() -> Tokenizer:
    """Trains a byte-level BPE tokenizer with `VOCABULARY` tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the text gave {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}: add words to it")
    return tokenizer


def tokenizer_config(processor_class: str | None) -> dict[str, Any]:
    """Returns `tokenizer_config.json`: the end of a turn stops generation, the end of text pads."""
    named = [token for token, special in SPECIAL_TOKENS if special and token not in ("<|endoftext|>", "<|im_end|>")]
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "additional_special_tokens": named,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if processor_class:
        config["processor_class"] = processor_class
    return config


def vision_configs(name: str) -> dict[str, dict[str, Any]]:
    """Returns `preprocessor_config.json` and `video_preprocessor_config.json` of a family.

    An image costs 16 to 320 tokens in both families. `size` means pixels per image, and per frame for the videos of
    Qwen2.5-VL (at most 64 tokens for two frames), but pixels of all sampled frames together for those of Qwen3-VL.
    """
    qwen3 = name == "qwen3_vl"
    unit = PIXELS_3 if qwen3 else PIXELS
    shared: dict[str, Any] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5] if qwen3 else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if qwen3 else [0.26862954, 0.26130258, 0.27577711],
        "merge_size": 2,
        "patch_size": 16 if qwen3 else 14,
        "processor_class": "Qwen3VLProcessor" if qwen3 else "Qwen2_5_VLProcessor",
        "resample": 3,  # bicubic
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }
    image = {
        **shared,
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 16 * unit, "longest_edge": 320 * unit},
    }
    video = {
        **shared,
        "do_sample_frames": True,
        "fps": 2.0,
        "max_frames": 16,
        "min_frames": 4,
        "size": {"shortest_edge": 64 * unit, "longest_edge": 512 * unit}
        if qwen3
        else {"shortest_edge": 16 * unit, "longest_edge": 64 * unit},
        "video_processor_type": "Qwen3VLVideoProcessor" if qwen3 else "Qwen2VLVideoProcessor",
    }
    return {"preprocessor_config.json": image, "video_preprocessor_config.json": video}


def write(out: Path) -> None:
    """Writes the three directories below `out`."""
    tokenizer = train().to_str(pretty=False) + "\n"
    template = (ROOT / "energon_packing" / "demo" / "chat_template.jinja").read_text(encoding="utf-8")
    for name, processor_class in (
        ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
        ("qwen3_vl", "Qwen3VLProcessor"),
        ("text", None),
    ):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        configs = {"tokenizer_config.json": tokenizer_config(processor_class)}
        if processor_class:
            configs |= vision_configs(name)
        for file_name, config in configs.items():
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (folder / file_name).write_text(text, encoding="utf-8")
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def main() -> None:
    """Writes the processor directories and prints the size of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "energon_packing" / "demo" / "processors")
    out: Path = parser.parse_args().out
    write(out)
    for path in sorted(out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>8} {path}")


if __name__ == "__main__":
    main()
