"""`PackedBatch.to_hugging_face` on models of transformers: the loss of a row is that of its samples alone."""

import dataclasses

import pytest
import torch
import transformers
from support.bridge_cpu.tiny_models import hugging_face_config, special_tokens

from energon_packing import thd
from energon_packing.config import ParallelConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.energon.loader import build_loader
from energon_packing.errors import PackingError


@pytest.fixture(scope="module", params=["qwen2_5_vl-between", "text-between", "text-real"])
def row_and_model(request, run_config_of):
    """A row of aligned samples, and a tiny model with the attention that transformers chooses."""
    family, padding = request.param.split("-")
    positions = "1d" if family == "text" else "mrope"
    config = run_config_of(family=family, seq_length=1024)
    encoder = dataclasses.replace(config.encoder, position_ids=positions)
    packing = dataclasses.replace(config.packing, padding=padding)
    parallel = ParallelConfig(context_parallel=2)
    config = dataclasses.replace(config, encoder=encoder, packing=packing, parallel=parallel)
    vocabulary = ConversationEncoder(encoder).tokenizer.get_vocab()
    torch.manual_seed(0)
    made = hugging_face_config(family, vocab_size=max(vocabulary.values()) + 1, tokens=special_tokens(vocabulary))
    if family != "text":
        made.vision_config.tokens_per_second = encoder.tokens_per_second  # of the released models, not the class's own
    kind = transformers.AutoModelForCausalLM if family == "text" else transformers.AutoModelForImageTextToText
    loader = build_loader(config)
    batches = (pack.batch for pack in loader if pack.batch.num_samples > 1)
    batch = next(batch for batch in batches if batch.pad_between_seqs == (padding == "between"))
    return batch, kind.from_config(made).float().train()


def test_the_loss_of_a_row_is_that_of_its_samples_alone(row_and_model):
    batch, model = row_and_model
    total = targets = 0
    for row in thd.unpack(batch):
        ids = row["input_ids"][None]
        kinds = {}
        if "image_token_id" in model.config.to_dict():
            images, videos = ids == model.config.image_token_id, ids == model.config.video_token_id
            kinds = {"mm_token_type_ids": images + 2 * videos}
        visual = thd.finished_row(row).get("visual_inputs") or {}
        logits = model(input_ids=ids, use_cache=False, **kinds, **visual).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, row["labels"], ignore_index=-100, reduction="none")
        total, targets = total + (losses * row["loss_mask"]).sum(), targets + int(row["loss_mask"].sum())
    assert targets > 100
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        packed = model(**batch.to_hugging_face()).loss
        torch.testing.assert_close(packed, total / targets, rtol=1e-6, atol=0)
    packed.backward()
    # With a cache, transformers looks for no segments: samples would see each other, and nothing would say so.
    cached = model(**batch.to_hugging_face() | {"use_cache": True}).loss
    assert (cached - packed).abs() > 1e-4


def test_what_transformers_cannot_take_is_refused(row_and_model):
    batch = row_and_model[0]
    with pytest.raises(PackingError, match="weights other than 0 and 1"):
        dataclasses.replace(batch, loss_mask=batch.loss_mask / 2).to_hugging_face()
    with pytest.raises(PackingError, match="whole rows"):
        thd.slice_for_context_parallel(batch, cp_size=2, cp_rank=0).to_hugging_face()
    if batch.visual_inputs:
        with pytest.raises(PackingError, match="set encoder"):
            dataclasses.replace(batch, position_ids=batch.position_ids[0]).to_hugging_face()
