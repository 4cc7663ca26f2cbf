"""Every setting of a run, changed in turn: where the stream of packs changes, a state of the old stream is refused."""

import dataclasses
import hashlib
import itertools
import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from support.old_states import refused_without

from energon_packing.config import (
    DataConfig,
    EncoderConfig,
    LimitsConfig,
    PackingConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.energon.states import FIELDS as FIELDS_OF_STATES
from energon_packing.energon.states import READERS, check_fingerprint
from energon_packing.errors import ConfigError
from energon_packing.families.registry import cost_of

FREE = {name for name, entry in FIELDS_OF_STATES.items() if entry.metadata.get("changes") == "nothing"}
"""Settings that cannot change a pack."""
BY_CONTENT = {
    name: entry.metadata["stated"] for name, entry in FIELDS_OF_STATES.items() if entry.metadata.get("stated")
}
"""Settings that name something, with the entry of the fingerprint that says what it was."""
full = pytest.mark.full
PACKS = 14  # more than an epoch of the small data set
BASE: dict[str, Any] = {
    "data.workers": 0,
    "data.shuffle_buffer": 4,
    "packing.seq_length": 2048,
    "packing.window": 6,
    "packing.drop_budget": 1.0,
    "encoder.decode_in_child": False,
}
MROPE = {"encoder.position_ids": "mrope"}
SPLIT = {"packing.oversize": "split", "packing.seq_length": 256}
FIXED = {"packing.pad_to_max_length": True, "packing.max_segments_per_pack": 4, "encoder.modality": "text"}
FEW_TOKENS = {"encoder.limits.max_tokens": 300, "packing.seq_length": 512}  # three conversations have fewer

# Each field: another value, what both sides have besides, and whether packs change. A new field needs a row.
CHANGES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "data.path": ("COPY", {}, False),
    "data.split": ("val", {}, True),
    "data.workers": (2, {}, True),
    "data.shuffle_buffer": (5, {}, True),
    "data.shuffle_over_epochs": (2, {}, True),
    "data.repeat": (False, {}, True),
    "data.epoch_end": ("pad", {"data.repeat": False}, False),  # one rank has nobody to wait for
    "data.seed": (1, {}, True),
    "data.packs_ahead": (5, {}, False),
    "data.keep_memory": (False, {}, False),
    "data.order_micro_batches": (True, {}, False),  # nothing without pipeline stages
    "data.storage_patience": (5.0, {}, False),
    "data.accept_changed": (("encoder",), {}, False),
    "data.trust": (True, {}, False),
    "encoder.processor": ("qwen3_vl", {}, True),
    "encoder.family": ("qwen2_5_vl", {}, False),  # what ``auto`` found
    "encoder.modality": ("text", {}, True),
    "encoder.chat_template": ("chatml", {}, True),
    "encoder.thinking": ("trim_empty", {}, False),  # the demo has no empty spans
    "encoder.train_on": ("all", {}, True),
    "encoder.train_line_break": ("always", {}, True),
    "encoder.tool_definitions": ("optional", {}, False),
    "encoder.loss_weighting": ("sample", {}, True),
    "encoder.loss_scale": (7, {}, True),
    "encoder.trust_remote_code": (True, {}, False),
    "encoder.position_ids": ("mrope", {}, True),
    "encoder.tokens_per_second": (25, MROPE, True),
    "encoder.min_pixels": (40_000, {}, True),
    "encoder.max_pixels": (20_000, {}, True),
    "encoder.video_min_pixels": (200_000, {"encoder.video_max_pixels": 400_000}, True),
    "encoder.video_max_pixels": (20_000, {}, True),
    "encoder.video_fps": (8.0, {}, True),
    "encoder.video_min_frames": (8, {}, True),
    "encoder.video_times": ("processor", {}, False),  # the demo's clips are even
    "encoder.video_max_frames": (4, {"encoder.video_fps": 8.0}, True),
    "encoder.pixels": ("bfloat16", {}, True),
    "encoder.jpeg_scaled_decoding": (1.0, {"encoder.min_pixels": 3136, "encoder.max_pixels": 10_000}, True),
    "encoder.special_tokens_in_text": ("text", {}, False),  # the demo's texts have none
    "encoder.template_date": ("2026-01-31", {}, False),  # the demo's template writes none
    "encoder.transparency": ("processor", {}, False),  # the demo's images are opaque
    "encoder.max_source_pixels": (50_000, {}, True),
    "encoder.max_decoded_bytes": (200_000, {}, True),
    "encoder.decode_seconds": (1e-9, {}, True),
    "encoder.decode_in_child": (True, {}, False),
    "encoder.limits.max_images": (0, {}, True),
    "encoder.limits.max_frames": (3, {}, True),
    "encoder.limits.max_visual_tokens": (60, {}, True),
    "encoder.limits.max_tokens": (300, {}, True),
    "encoder.limits.when_over": (("truncate",), FEW_TOKENS, True),
    "encoder.limits.min_active_ratio": (0.5, {}, True),
    "encoder.extra_fields": (("preference",), {}, True),
    "packing.seq_length": (1024, {}, True),
    "packing.window": (9, {}, True),
    "packing.policy": ("next_fit", {}, True),
    "packing.max_images_per_pack": (1, {}, True),
    "packing.max_patches_per_pack": (600, {}, True),
    "packing.max_segments_per_pack": (2, {}, True),
    "packing.max_cost_per_pack": (1000.0, {}, True),
    "packing.max_padded_pixels_per_pack": (1000, {}, False),  # this family does not pad
    "packing.balance_window": (4, {}, True),
    "packing.cost_model": ("MODEL", {"packing.balance_window": 4}, True),
    "packing.cost_frozen": (("vision_model",), {"packing.cost_model": "MODEL"}, False),  # needs a balance window
    "packing.oversize": ("truncate", {"packing.seq_length": 256}, True),
    "packing.split_at": ("token", SPLIT, True),
    "packing.split_positions": ("continue", SPLIT, True),
    "packing.pairs": ("drop", {}, False),  # the demo has no pairs
    "packing.pad_to_max_length": (True, {}, True),
    "packing.pad_cu_seqlens": (True, FIXED, True),
    "packing.padding": ("real", {}, False),
    "packing.dummy_image": (True, {}, True),
    "packing.drop_budget": (0.9, {}, False),
    "packing.max_drops_without_pack": (5000, {}, False),
    "packing.ledger": ("LEDGER", {}, False),
    "parallel.tensor_parallel": (2, {"parallel.sequence_parallel": True}, True),
    "parallel.context_parallel": (2, {}, True),
    "parallel.min_dynamic_context_parallel_size": (2, {"parallel.context_parallel": "dynamic"}, False),
    "parallel.max_dynamic_context_parallel_size": (4, {"parallel.context_parallel": "dynamic"}, True),
    "parallel.max_seqlen_per_dp_cp_rank": (512, {"parallel.context_parallel": "dynamic"}, False),
    "parallel.exchange_cost": (0.05, {"parallel.context_parallel": "dynamic"}, False),
    "parallel.pipeline_parallel": (2, {}, False),
    "parallel.virtual_pipeline": (2, {}, False),
    "parallel.microbatch_group_size_per_vp_stage": (2, {}, False),
    "parallel.expert_parallel": (2, {}, False),
    "parallel.sequence_parallel": (True, {"parallel.tensor_parallel": 2}, True),
    "parallel.eval_context_parallel": (2, {}, True),
    "parallel.cp_comm_type": ("p2p", {}, False),
    "parallel.hierarchical_context_parallel_sizes": ((2,), {}, False),
}
PLACES = {"ledger": "ledger", "cost_model": "model"}
TOGETHER = {name: value for name, (value, besides, changes) in CHANGES.items() if not (besides or changes)}
"""Fields that change no pack; all at once change none either, so one stream is read for them."""
SECTIONS = {"data": DataConfig, "encoder": EncoderConfig, "packing": PackingConfig, "parallel": ParallelConfig}
REFUSED = {"encoder.pan_and_scan": True}  # by the family; tests/families/test_gemma3_against_processor.py has its own
FAST = (
    *("data.shuffle_over_epochs", "data.workers", "encoder.tokens_per_second", "encoder.max_source_pixels"),
    *("encoder.max_decoded_bytes", "packing.pad_to_max_length", "packing.window", "packing.ledger", "data.path"),
)
"""Fields of the fast tier."""
SAID_BY_PACKS = ("encoder.family", "encoder.processor", "encoder.chat_template")


OLDEST = {
    *("data set", "rank", "ranks", "split", "workers", "multiple", "encoder.limits", "limits"),
    *("tokenizer", "chat_template", "stop_tokens", "family", "modality", "pixels", "position_ids", "loss_weighting"),
    *("vision_limits", "video_fps", "video_frames", "video_frame_limits", "train_on", "train_line_break", "thinking"),
    *("tool_definitions", "extra_fields", "transparency"),
    *(f"data.{name}" for name in ("epoch_end", "repeat", "seed", "shuffle_buffer", "shuffle_over_epochs")),
    *(f"encoder.{name}" for name in ("modality", "thinking", "train_on", "train_line_break", "tool_definitions")),
    *(f"encoder.{name}" for name in ("loss_weighting", "loss_scale", "position_ids", "tokens_per_second")),
    *(f"encoder.{name}" for name in ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels")),
    *(f"encoder.{name}" for name in ("video_fps", "video_min_frames", "video_max_frames", "pan_and_scan")),
    *(f"encoder.{name}" for name in ("transparency", "extra_fields", "decode_seconds")),
    *(f"encoder.{name}" for name in ("max_source_pixels", "max_decoded_bytes")),
    *(f"packing.{name}" for name in ("seq_length", "window", "policy", "oversize", "split_at", "split_positions")),
    *(f"packing.max_{name}_per_pack" for name in ("images", "patches", "segments", "cost")),
    *(f"packing.{name}" for name in ("balance_window", "pad_to_max_length", "dummy_image")),
}
"""Entries of a fingerprint that every state has. It is complete: an entry of a later version may be missing."""


def fields(section: str, config: type) -> list[str]:
    found = [f"{section}.{entry.name}" for entry in dataclasses.fields(config)]
    if config is EncoderConfig:
        found.remove("encoder.limits")
        found += [f"encoder.limits.{entry.name}" for entry in dataclasses.fields(LimitsConfig)]
    return found


FIELDS = [name for section, config in SECTIONS.items() for name in fields(section, config)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A data set of 30 conversations, and its copy."""
    root = tmp_path_factory.mktemp("fingerprint")
    source = make_data(root / "raw", conversations=30, seed=5, defects=False)
    for name in ("data", "copy"):
        convert(ConvertConfig(sources=(source,), out=root / name, split={"train": 0.8, "val": 0.2}, workers=0))
    text = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 9000}
    transformers.Qwen2_5_VLConfig(text_config=text).save_pretrained(root / "model")  # costs more for an image than text
    return root


def made(root: Any, values: dict[str, Any]) -> RunConfig:
    """The configuration of dotted names."""
    values = {"data.path": str(root / "data"), "encoder.processor": "qwen2_5_vl", **BASE, **values}
    values |= {"data.path": str(root / "copy")} if values["data.path"] == "COPY" else {}
    values |= {f"packing.{it}": str(root / name) for it, name in PLACES.items() if values.get(f"packing.{it}")}
    values["encoder.processor"] = str(processor_path(values["encoder.processor"]))
    limits = {name.split(".")[2]: value for name, value in values.items() if name.startswith("encoder.limits.")}

    def section(name: str) -> dict[str, Any]:
        return {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{name}.")}

    encoder = {name: value for name, value in section("encoder").items() if name != "limits"}
    return RunConfig(
        data=DataConfig(**section("data")),
        encoder=EncoderConfig(**encoder, limits=LimitsConfig(**limits)),
        packing=PackingConfig(**section("packing")),
        parallel=ParallelConfig(**section("parallel")),
    )


class Streams:
    """Streams of configurations by their dotted names, each read once."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._known: dict[str, Any] = {}

    def of(self, values: dict[str, Any]) -> tuple[list[str], Any]:
        """Digests of the first packs, and the fingerprint of a state."""
        known = json.dumps(values, sort_keys=True, default=str)
        if known not in self._known:
            loader = build_loader(made(self.root, values))
            digests = list(map(digest, itertools.islice(loader, PACKS)))
            self._known[known] = digests, loader.save_state()["fingerprint"]
        return self._known[known]

    def fingerprint(self, values: dict[str, Any]) -> Any:
        """That of a state from before the first pack."""
        return build_loader(made(self.root, values)).save_state()["fingerprint"]

    def against(self, before: list[str], values: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Whether another stream has those digests, read up to the first that differs; and its fingerprint."""
        loader = build_loader(made(self.root, values))
        fingerprint = None
        expected = iter(before)
        for pack in itertools.islice(loader, PACKS):
            fingerprint = fingerprint or loader.save_state()["fingerprint"]
            if digest(pack) != next(expected, None):
                return False, fingerprint
        return next(expected, None) is None, fingerprint


def digest(pack: Any) -> str:
    """Of everything that a step reads."""
    batch = pack.batch
    found = hashlib.sha256(repr((pack.keys, batch.total_tokens)).encode())
    tensors = {**batch.token_tensors, **(batch.visual_inputs or {})}
    tensors |= {"cu_seqlens": batch.cu_seqlens, "cu_seqlens_padded": batch.cu_seqlens_padded}
    found.update(repr(sorted((batch.pixel_forms or {}).items())).encode())  # what makes pixels of bytes
    for name, value in sorted(tensors.items()):
        if value is not None:
            found.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


@pytest.fixture(scope="module")
def streams(small: Any) -> Streams:
    return Streams(small)


def test_every_field_has_a_change_here() -> None:
    assert sorted([*CHANGES, *REFUSED]) == sorted(FIELDS)
    assert {*FREE, *BY_CONTENT} <= set(FIELDS)
    sections = {entry.name for entry in dataclasses.fields(RunConfig)}
    # The loader of a data set reads none of them, that of a plan has its own state; metrics count packs when the
    # trainer has them.
    assert sections - set(SECTIONS) == {"training", "plan", "metrics"}
    assert "read by ``validate``, and for ``data.order_micro_batches``" in str(TrainingConfig.__doc__)


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=full) for name in CHANGES])
def test_a_state_is_refused_wherever_the_changed_setting_changes_the_stream(streams: Streams, name: str) -> None:
    value, besides, changes = CHANGES[name]
    before, old = streams.of(besides)
    if name in TOGETHER and streams.of(TOGETHER)[0] == before:
        same, new = True, streams.fingerprint({name: value})
    else:
        same, new = streams.against(before, {**besides, name: value})
    assert (not same) == changes, "the table says otherwise"
    if name in FREE or not (changes or name not in BY_CONTENT):
        assert old == new
    else:
        assert old != new
        with pytest.raises(ConfigError) as caught:
            check_fingerprint(old, new)
        told = BY_CONTENT.get(name, "encoder.limits" if ".limits." in name else name)
        said = f"{told}=" in str(caught.value) or f"without any {told}," in str(caught.value)
        assert said or told in READERS or name in SAID_BY_PACKS
    if name in FREE:
        assert not changes


def test_a_cost_is_stated_by_what_it_is_and_only_where_packs_are_ordered_by_it(streams: Streams, tmp_path: Any) -> None:
    def of(model: Any, balance: int = 4, frozen: tuple[Any, ...] = ()) -> Any:
        cost_of.cache_clear()  # as in another process
        run = made(streams.root, {})
        packing = dataclasses.replace(
            run.packing, balance_window=balance, cost_model=str(model or ""), cost_frozen=frozen
        )
        return build_loader(dataclasses.replace(run, packing=packing)).save_state()["fingerprint"]

    stated, here = streams.root / "model", tmp_path / "moved"
    shutil.copytree(stated, here)
    known = of(stated)
    assert of(here) == known
    assert of(stated, balance=1) == of(None, balance=1) == streams.fingerprint({})
    assert not {"packing.cost_model", "packing.cost_frozen"} & streams.fingerprint({}).keys()
    # Each side counts the same layers otherwise, under the same name.
    transformers.Qwen2_5_VLConfig(text_config={"num_hidden_layers": 5}).save_pretrained(here)
    for other in (of(here), of(stated, frozen=("vision_model",)), of(None)):
        with pytest.raises(ConfigError, match=r"made with packing\.cost_model="):
            check_fingerprint(known, other)
        assert check_fingerprint(known, other, ("packing.cost_model",))
    # What reads it may be accepted alone.
    with pytest.raises(ConfigError, match=r"packing\.balance_window"):
        check_fingerprint(of(None, balance=1), known)
    assert len(check_fingerprint(of(None, balance=1), known, ("packing.balance_window",))) == 2


def test_a_setting_that_a_family_refuses_is_refused_in_any_value(streams: Streams) -> None:
    for name, value in REFUSED.items():
        with pytest.raises(ConfigError, match=name):
            streams.of({name: value})


def test_a_state_of_a_policy_that_is_gone_is_refused_in_a_sentence_and_goes_on_where_that_is_accepted():
    saved, own = {"packing.policy": '"balanced"'}, {"packing.policy": '"window"'}
    with pytest.raises(ConfigError, match="balanced") as refused:
        check_fingerprint(saved, own)
    assert "window" in str(refused.value)
    assert len(check_fingerprint(saved, own, ("packing.policy",))) == 1


def test_a_state_from_before_a_setting_has_its_default() -> None:
    own = {"data.seed": "1", "encoder.special_tokens_in_text": '"keep"', "packing.pairs": '"refuse"'}
    assert check_fingerprint({"data.seed": "1"}, own) == check_fingerprint(own, {"data.seed": "1"}) == []
    with pytest.raises(ConfigError, match=r"made without any packing\.pairs, but this run has \"drop\""):
        check_fingerprint({"data.seed": "1"}, own | {"packing.pairs": '"drop"'})


def test_a_state_from_before_any_setting_but_the_oldest_is_accepted(streams: Streams) -> None:
    """A field without ``newer`` makes every state that is there useless; one of `LimitsConfig` always does."""
    own = streams.fingerprint({})
    assert {name for name in refused_without(own) if not name.startswith("data set ")} == OLDEST
    limits = json.loads(own["encoder.limits"])
    assert {*limits} == {"max_images", "max_frames", "max_visual_tokens", "max_tokens", "when_over", "min_active_ratio"}


def test_accepting_a_section_accepts_no_data_set() -> None:
    saved, own = ({"data.seed": seed, "data set": name} for seed, name in (("1", "old"), ("2", "new")))
    with pytest.raises(ConfigError, match="made with data set=old"):
        check_fingerprint(saved, own, ("data",))
    with pytest.raises(ConfigError, match=r"made with data\.seed=1"):
        check_fingerprint(saved, own, ("data set",))
    assert len(check_fingerprint(saved, own, ("data", "data set"))) == 2
    assert check_fingerprint({"data set 2 (a)": "old"}, {"data set 2 (a)": "new"}, ("data set",))
