"""Text-to-video rows: what becomes a sample, what is refused, and that no file runs anything."""

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from energon_packing.cli.convert import convert as command
from energon_packing.config import from_mapping
from energon_packing.convert import ConvertConfig
from energon_packing.convert.media_files import MediaChecker
from energon_packing.errors import SampleRejected
from energon_packing.wan.config import TextToVideoRunConfig
from energon_packing.wan.pack import to_patches
from energon_packing.wan.record import TextToVideo
from energon_packing.wan.task_encoder import build_text_to_video_loader
from energon_packing.wan.tensor_files import read_tensor, tensor_info


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


class Reduced:
    """A call that unpickling makes."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def saved(values, **form):
    stream = io.BytesIO()
    torch.save(values, stream, **form)
    return stream.getvalue()


def old_form(tensor):
    return saved(tensor.storage(), _use_new_zipfile_serialization=False)


ZIPPED = saved(torch.ones(4).storage())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"caption": "x", "latents": "missing.npy"}, "missing_media"),
        ({"caption": "x", "latents": "../outside.npy"}, "media_outside_root"),
        ({"caption": "x", "latents": "cut.npy"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "cut.safetensors"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "empty.npy"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "object.npy"}, "wrong_dtype"),
        ({"caption": "x", "latents": "nan.npy"}, "not_finite"),
        ({"caption": "x", "latents": "text.npy"}, "wrong_shape"),
        ({"caption": "x", "latents": "planted.pt"}, "unsafe_pickle"),
        ({"caption": "x", "latents": "planted.pickle"}, "unsafe_pickle"),
        ({"caption": "x", "latents": "claims.pickle"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "cut.pickle"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "beyond.pickle"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "room.pickle"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "zipped.pickle"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "room.pt"}, "unsafe_pickle"),
        ({"caption": "x", "latents": "repeated.pt"}, "corrupt_tensor"),
        ({"caption": "x", "latents": "large.npy"}, "media_too_large"),
        ({"caption": "x", "latents": "good.csv"}, "unknown_tensor_format"),
        ({"caption": "x", "video": "good.npy"}, "corrupt_media"),
        ({"caption": "x", "video": "https://example.org/a.mp4"}, "remote_media"),
        ({"caption": " ", "latents": "good.npy"}, "empty_caption"),
        ({"latents": "good.npy", "context": "zeros.npy"}, "empty_context"),
        ({"caption": "x"}, "unknown_layout"),
        ({"caption": "x", "prompt": "y", "latents": "good.npy"}, "conflicting_columns"),
        ({"caption": 7, "latents": "good.npy"}, "non_string_value"),
    ],
)
def test_a_bad_row_is_refused_with_its_reason_and_the_rest_goes_on(row, reason, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    good = np.ones((4, 1, 2, 2), dtype=np.float32)
    np.save(source / "good.npy", good)
    np.save(tmp_path / "outside.npy", good)
    np.save(source / "nan.npy", good * np.nan)
    np.save(source / "large.npy", np.ones((4, 100, 40, 40)))
    np.save(source / "text.npy", good[0, 0])
    np.save(source / "zeros.npy", np.zeros((3, 8), dtype=np.float32))
    np.save(source / "object.npy", np.array([Planted(tmp_path / "ran")], dtype=object), allow_pickle=True)
    save_file({"latents": torch.ones(4, 1, 2, 2)}, source / "whole.safetensors")
    (source / "cut.safetensors").write_bytes((source / "whole.safetensors").read_bytes()[:-4])
    (source / "cut.npy").write_bytes((source / "good.npy").read_bytes()[:-4])
    (source / "empty.npy").touch()
    (source / "good.csv").write_text("1,2")
    torch.save(Planted(tmp_path / "ran"), source / "planted.pt")
    torch.save(torch.ones(1).expand(4, 10_000, 1_000, 1_000), source / "repeated.pt")
    (source / "planted.pickle").write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    (source / "claims.pickle").write_bytes(b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".")  # a bytearray
    room = pickle.dumps(Reduced(bytearray, 1 << 50), 2)
    for name, storage, size in (
        ("room", room, 4),
        ("beyond", old_form(torch.ones(10)), 1 << 20),
        ("zipped", ZIPPED, 4),
    ):
        flat = Reduced(torch.storage._load_from_bytes, storage)
        built = Reduced(torch._utils._rebuild_tensor_v2, flat, 0, (1, 1, 1, size), (1, 1, 1, 1), False, {})
        (source / f"{name}.pickle").write_bytes(pickle.dumps(built, 4).replace(b"}", b")"))
    with zipfile.ZipFile(source / "whole.pt", "w") as archive:
        torch.save(torch.ones(4, 1, 2, 2), source / "other.pt")
        with zipfile.ZipFile(source / "other.pt") as other:
            for name in other.namelist():
                archive.writestr(name, room if name.endswith("data.pkl") else other.read(name))
    (source / "whole.pt").rename(source / "room.pt")
    (source / "cut.pickle").write_bytes(pickle.dumps(torch.ones(4, 1, 2, 2))[:-9])
    (tmp_path / "ran").unlink(missing_ok=True)
    rows = [row, {"id": "fine", "caption": "x", "latents": "good.npy"}]
    (source / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--format", "text-to-video", "--max-media-mib", "1", "--workers", "0", "--split", "train=1", "--json"]
    done = CliRunner().invoke(command, [str(source / "rows.jsonl"), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["rejected"] == {reason: 1}
    assert (report["written"], report["tensors"]) == (1, 1)
    assert not (tmp_path / "ran").exists()


def test_a_data_set_of_bridges_own_script_is_read_as_it_is(tmp_path):
    """Members as ``examples/models/wan/prepare_dataset/prepare_dataset_wan.py`` of Bridge (067f987) writes them."""
    from webdataset import TarWriter

    texts, latents = {}, {}
    with TarWriter(str(tmp_path / "000000.tar")) as tar:
        for number in range(3):
            key, text = f"{number:06}", torch.zeros(1, 512, 8)
            text[:, : 4 + number] = torch.randn(1, 4 + number, 8)
            texts[key], latents[key] = text[0, : 4 + number], torch.randn(4, 1 + number, 4, 4)
            facts = {"video_path": f"/videos/{key}.mp4", "processed_frames": 1 + 4 * number, "caption": "a ball rolls"}
            tar.write({"__key__": key, "pth": latents[key], "pickle": pickle.dumps(text), "json": facts})
    options = ["--format", "text-to-video", "--workers", "0", "--split", "train=1", "--json"]
    done = CliRunner().invoke(command, [str(tmp_path / "000000.tar"), "--out", str(tmp_path / "out"), *options])
    assert (done.exit_code, json.loads(done.stdout)["rejected"]) == (0, {}), done.output
    sections = {"encoder": {"latent_channels": 4, "text_width": 8}, "packing": {"seq_length": 64, "drop_budget": 0.0}}
    data = {"path": str(tmp_path / "out"), "workers": 0, "repeat": False}
    loader = build_text_to_video_loader(from_mapping(TextToVideoRunConfig, {"data": data, **sections}, where="run"))
    samples = {key: (latent, text) for pack in loader for key, latent, text in alone(pack.batch)}
    assert sorted(samples) == sorted(latents)
    for key, (patches, text) in samples.items():
        assert torch.equal(patches, to_patches(latents[key], (1, 2, 2)))
        assert torch.equal(text, texts[key])


def alone(pack):
    """Keys, real patches and real texts of a pack."""
    ends = pack.boundaries()
    for at, key in enumerate(pack.keys):
        rows = [slice(int(ends[f"cu_seq_len_{side}_padded"][at]), None) for side in ("q", "kv")]
        patches, text = pack.video_latents[rows[0], 0], pack.context_embeddings[rows[1], 0]
        yield key.rpartition("/")[2], patches[: pack.seq_len_q[at]], text[: pack.seq_len_kv[at]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_read_back_as_their_own_libraries_wrote_them(dtype, tmp_path):
    tensor = torch.randn(3, 4, 5).to(dtype)
    save_file({"a": torch.zeros(2), "latents": tensor}, tmp_path / "t.safetensors")
    torch.save({"latents": tensor.transpose(0, 2)}, tmp_path / "t.pt")
    assert torch.equal(read_tensor((tmp_path / "t.safetensors").read_bytes(), "safetensors", ("latents",)), tensor)
    found = read_tensor((tmp_path / "t.pt").read_bytes(), "pt", ("latents",))
    assert torch.equal(found, tensor.transpose(0, 2))
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert torch.equal(read_tensor(pickle.dumps(tensor.transpose(0, 2), protocol), "pickle"), found)
    with (tmp_path / "t.safetensors").open("rb") as stream:
        info = tensor_info(stream, "safetensors", ("latents",))
    assert (info.shape, f"torch.{info.dtype}") == ((3, 4, 5), str(dtype))
    with pytest.raises(SampleRejected, match="no_such_tensor"):
        read_tensor((tmp_path / "t.safetensors").read_bytes(), "safetensors", ("context",))
    if dtype != torch.bfloat16:
        for array in (
            tensor.numpy(),
            np.asfortranarray(tensor.numpy()),
            tensor.numpy().astype(tensor.numpy().dtype.newbyteorder(">")),
        ):
            np.save(tmp_path / "t.npy", array)
            assert torch.equal(read_tensor((tmp_path / "t.npy").read_bytes(), "npy"), tensor)


def test_stored_records_read_back_unchanged_and_padding_of_texts_is_known(dataset):
    import tarfile

    contexts = 0
    with tarfile.open(next((dataset / "text").glob("train-*.tar"))) as tar:
        for member in tar.getmembers():
            record = json.load(tar.extractfile(member))
            sample = TextToVideo.from_record(member.name.removesuffix(".json"), record)
            assert sample.to_record() == record
            if sample.context is not None:
                contexts += 1
                assert sample.context.rows == sample.context.shape[0] - 3
    assert contexts == 18


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latents": {"name": "../x.npy", "tensor": "", "shape": [4, 1, 2, 2], "dtype": "float32"}}, "media_outside"),
        ({"latents": {"name": "x.npy", "tensor": "", "shape": [4, 1, 2], "dtype": "float32"}}, "wrong_shape"),
        ({"latents": {"name": "x.npy", "tensor": "", "shape": [4, -1, 2, 2], "dtype": "float32"}}, "bad_record"),
        ({"latents": {"name": "x.npy", "tensor": "", "shape": [4, 1, 2, 2], "dtype": "int8"}}, "bad_record"),
        ({"latents": {"name": "a\ud800.npy", "tensor": "", "shape": [4, 1, 2, 2], "dtype": "float32"}}, "bad_record"),
        ({"version": True}, "bad_record"),
        ({"caption": None}, "bad_record"),
        ({"unknown": 1}, "bad_record"),
        ({"kind": "other"}, "bad_record"),
    ],
)
def test_a_damaged_record_is_refused(change, reason):
    record = {
        "version": 1,
        "kind": "text_to_video",
        "caption": "x",
        "latents": {"name": "x.npy", "tensor": "", "shape": [4, 1, 2, 2], "dtype": "float32"},
    }
    TextToVideo.from_record("k", record)
    with pytest.raises(SampleRejected, match=reason):
        TextToVideo.from_record("k", record | change)


@pytest.mark.parametrize("fps", [None, 16.0])
@pytest.mark.parametrize("form", ["png", "jpg", "webp", "column"])
def test_an_image_is_a_clip_of_one_frame(form, fps, pipeline, tmp_path):
    """The oracles: Pillow's pixels, and diffusers' VAE."""
    from PIL import Image
    from webdataset import TarWriter

    from energon_packing.wan.encoder import WanLatentEncoder

    pictures, source = {}, tmp_path / f"images.{'jsonl' if form == 'column' else 'tar'}"
    for number, size in enumerate([(64, 48), (32, 64), (48, 48)]):
        across = np.linspace(0, 255, size[0])[None, :, None] * np.array([1.0, 0.5, 0.0])
        pixels = np.broadcast_to(across + 20 * number, (size[1], size[0], 3)).clip(0, 255).astype(np.uint8)
        path = tmp_path / f"{number}.{'png' if form == 'column' else form}"
        Image.fromarray(pixels).save(path, **({"lossless": True} if form == "webp" else {}))
        pictures[f"{number:06}"] = path
    if form == "column":
        lines = [{"id": key, "caption": "a ball", "image": path.name} for key, path in pictures.items()]
        source.write_text("\n".join(map(json.dumps, lines)))
    else:
        with TarWriter(str(source)) as tar:
            for key, path in pictures.items():
                tar.write({"__key__": key, form: path.read_bytes(), "json": {"caption": "a ball"}})
    options = ["--format", "text-to-video", "--workers", "0", "--split", "train=1", "--json"]
    done = CliRunner().invoke(command, [str(source), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 0, done.output
    assert (json.loads(done.stdout)["rejected"], json.loads(done.stdout)["images"]) == ({}, 3)
    models = {"vae": str(pipeline), "text_encoder": str(pipeline), "latent_channels": 4, "text_width": 32, "fps": fps}
    data = {"path": str(tmp_path / "out"), "workers": 0, "repeat": False}
    sections = {"data": data, "encoder": models, "packing": {"seq_length": 64, "drop_budget": 0.0}}
    packs = list(build_text_to_video_loader(from_mapping(TextToVideoRunConfig, sections, where="run")))
    samples = {key: patches for pack in packs for key, patches, _ in alone(pack.batch)}
    assert sorted(samples) == sorted(pictures)
    assert [entry for pack in packs for entry in pack.changed] == []
    encoder = WanLatentEncoder(str(pipeline))
    for key, patches in samples.items():
        with Image.open(pictures[key]) as image:
            latents = encoder.encode(torch.from_numpy(np.array(image.convert("RGB")))[None])
        assert torch.equal(patches, to_patches(latents, (1, 2, 2)))


def test_a_preview_image_beside_a_clip_is_ignored_and_told(tmp_path):
    np.save(tmp_path / "clip.npy", np.ones((4, 1, 2, 2), dtype=np.float32))
    row = {"id": "v", "caption": "x", "latents": "clip.npy", "images": ["missing.png", "other.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    options = ["--format", "text-to-video", "--workers", "0", "--split", "train=1", "--json"]
    done = CliRunner().invoke(command, [str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), *options])
    report = json.loads(done.stdout)
    assert (report["written"], report["rejected"]) == (1, {})
    assert "images" in str(report["ignored_columns"])


def test_a_tensor_file_that_was_checked_is_not_checked_again(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((4, 8), dtype=np.float32))
    os.utime(tmp_path / "a.npy", (1, 1))  # a file of this second is not noted
    config = ConvertConfig(sources=(tmp_path,), format="text-to-video")
    found, sizes = [], []
    for number in range(2):
        checker = MediaChecker(config, tmp_path / "journal", tmp_path / f"index{number}")
        found.append(checker.check(str(tmp_path / "a.npy"), "context", "a.npy")[0])
        checker.close()
        sizes.append((tmp_path / "journal").stat().st_size)
    assert found[0] == found[1]
    assert sizes[0] == sizes[1] > 0
