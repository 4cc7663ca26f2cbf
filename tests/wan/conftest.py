"""Tiny Wan models on disk, and text-to-video data of every kind, made once a session."""

import hashlib
import json

import numpy as np
import pytest
import torch
import torch.utils.data._utils
from support.media_files import write_clip

# Closing a loader's workers takes seconds at torch's default, for every loader of a test.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

CHANNELS, WIDTH = 4, 32
WORDS = ["a", "the", "red", "blue", "ball", "dog", "rolls", "runs", "over", "under", "green", "hill", "sea", "fast"]


@pytest.fixture(scope="session", autouse=True)
def latents_made_once():
    """The VAE takes most of the time of these tests, and gives the same latents of the same frames."""
    from energon_packing.wan.encoder import WanLatentEncoder

    made, encode = {}, WanLatentEncoder.encode

    def once(self, frames):
        key = self.name, frames.shape, hashlib.sha256(frames.numpy().tobytes()).digest()
        if key not in made:
            made[key] = encode(self, frames)
        return made[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanLatentEncoder, "encode", once)
        yield


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory):
    """Directory of a diffusers pipeline: a Wan VAE of 60,000 weights, a UMT5 of two layers, a tokenizer of words."""
    diffusers = pytest.importorskip("diffusers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    root = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    ).save_pretrained(root / "vae")
    UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ).save_pretrained(root / "text_encoder")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(root / "tokenizer")
    return root


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """A JSON Lines file of 36 good rows: clips, latents of three formats, captions and embeddings in all mixtures."""
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("clips")
    random = np.random.default_rng(0)
    generator = torch.Generator().manual_seed(0)
    clips = [
        write_clip(root / f"clip{index}.mp4", frames=frames, width=width, height=height, fps=fps)
        for index, (frames, width, height, fps) in enumerate(
            [(9, 64, 48, 16), (21, 48, 64, 16), (30, 96, 32, 30), (6, 50, 70, 8), (1, 32, 32, 16)]
        )
    ]
    lines = []
    for number in range(36):
        words = random.choice(WORDS, size=int(random.integers(1, 12)))
        row = {"id": f"s{number}", "caption": " ".join(words), "metadata": {"number": number}}
        if number % 3 == 0:
            row["video"] = clips[number // 3 % len(clips)].name
        else:
            frames, height, width = (int(side) for side in random.integers(1, 5, 3))
            latent = torch.randn(CHANNELS, frames, 2 * height, 2 * width, generator=generator)
            suffix = ("npy", "safetensors", "pt")[number % 4 % 3]
            row["latents"] = f"{number}.{suffix}"
            if suffix == "npy":
                np.save(root / row["latents"], latent.numpy())
            elif suffix == "safetensors":
                save_file({"latents": latent, "other": torch.zeros(2)}, root / row["latents"])
            else:
                torch.save({"latents": latent[None].bfloat16()}, root / row["latents"])
        if number % 2:
            text = torch.randn(int(random.integers(1, 20)), WIDTH, generator=generator)
            padded = torch.cat([text, torch.zeros(3, WIDTH)])  # as pipelines store them
            np.save(root / f"{number}.text.npy", padded.numpy())
            row["context"] = f"{number}.text.npy"
        lines.append(json.dumps(row))
    (root / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return root / "rows.jsonl"


@pytest.fixture(scope="session")
def dataset(rows, tmp_path_factory):
    """Directory of the converted rows."""
    from energon_packing.convert import ConvertConfig, convert

    out = tmp_path_factory.mktemp("converted") / "data"
    report = convert(ConvertConfig(sources=(rows,), out=out, format="text-to-video", split={"train": 1.0}, workers=1))
    assert report.rejected == {}
    return out
