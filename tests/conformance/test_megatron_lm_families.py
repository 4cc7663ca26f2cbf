"""GLM-4.5V and Ernie 4.5 VL of Bridge in Megatron-LM's vision step: the same losses as in Bridge's.

The oracle is the call that Bridge's ``vlm_step`` makes (`row_parity.forward`) on the same row and model. A model that
does not take what the family needs is refused by both steps before it runs.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
if importlib.util.find_spec("megatron.training") is None or importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron.training or the CPU stand-ins' Megatron-Bridge is not installed", allow_module_level=True)

import test_ernie_in_bridge as ernie
import test_glm_in_bridge as glm
from support.bridge_cpu import row_parity, training_run
from support.offline_processors import ernie4_5_vl, glm4v

from energon_packing import thd
from energon_packing.config import EncoderConfig
from energon_packing.encoders.encoder import ConversationEncoder
from energon_packing.encoders.joinable_rows import joinable
from energon_packing.errors import ConfigError

pytestmark = pytest.mark.usefixtures("stand_ins")

FAMILIES = {
    "glm4v": (glm, lambda: glm4v(glm.LIMITS, glm.LIMITS)),
    "ernie4_5_vl": (ernie, lambda: ernie4_5_vl(glm.LIMITS, glm.LIMITS, max_frames=4)),
}


def encoder_and_row(family, multiple=8):
    own, processor = FAMILIES[family]
    encoder = ConversationEncoder(EncoderConfig(), processor=processor())
    media = [(glm.image(90, 60, name="a"), glm.image(31, 33, name="b")), (), (glm.video(8, 2.0, 64, 64, name="c"),)]
    rows = [own.row_of(encoder, at, each, f"Answer {at}.") for at, each in enumerate(media)]
    return encoder, thd.assemble(joinable(rows, encoder.fields), multiple=multiple, extra_fields=encoder.fields)


def model_of(family, encoder, monkeypatch):
    if family == "ernie4_5_vl":
        ernie.known_layers(monkeypatch)
    provider = FAMILIES[family][0].provider(encoder)
    provider.moe_router_load_balancing_type = "aux_loss"  # GLM's own is per sequence, which a packed row refuses
    return training_run.build_model(provider)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_losses_are_those_of_bridges_step_types_of_tokens_included(family, monkeypatch):
    from energon_packing.megatron_lm import vlm
    from energon_packing.megatron_lm.batch import get_batch

    encoder, row = encoder_and_row(family)
    with training_run.process_groups(), torch.no_grad():
        model = model_of(family, encoder, monkeypatch)
        theirs = row_parity.forward(model, row.to_bridge(), with_labels=True)
        batch = get_batch(iter([row]), whole_row=True)
        ours = vlm._call_by_name(model, batch)
        ours = ours[0] if isinstance(ours, tuple) else ours
        assert {name: each.dtype for name, each in batch.model_inputs.items()} == dict.fromkeys(
            [field.name for field in encoder.token_fields], torch.int64
        )
        # The last of them decides about positions (GLM) or experts (Ernie), so its values must matter.
        last = encoder.token_fields[-1].name
        silent = replace(batch, model_inputs={**batch.model_inputs, last: torch.zeros_like(row.tokens)})
        if family == "ernie4_5_vl":
            without = vlm._call_by_name(model, silent)
            without = without[0] if isinstance(without, tuple) else without
            assert float((ours - without).abs().max()) > 1e-3
    real = ~row.padding_mask
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_the_experts_of_a_vision_model_get_the_padding_of_the_row(monkeypatch):
    from megatron.core.transformer.moe.router import TopKRouter

    from energon_packing.megatron_lm import vlm
    from energon_packing.megatron_lm.batch import get_batch

    encoder, row = encoder_and_row("glm4v")
    seen = []
    with training_run.process_groups(), torch.no_grad():
        model = model_of("glm4v", encoder, monkeypatch)
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
        vlm._call_by_name(model, get_batch(iter([row]), whole_row=True))
    assert row.padding_mask.any()
    assert seen
    assert all(torch.equal(mask.reshape(1, -1), row.padding_mask) for mask in seen)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trainer", ["Bridge", "Megatron-LM"])
def test_a_model_that_does_not_take_what_the_family_needs_is_refused_before_it_runs(
    family, trainer, tmp_path, monkeypatch
):
    from energon_packing.bridge import step
    from energon_packing.megatron_lm import gpt
    from energon_packing.megatron_lm.batch import get_batch

    encoder, row = encoder_and_row(family)
    encoder.processor.save_pretrained(tmp_path)
    run = SimpleNamespace(encoder=EncoderConfig(processor=str(tmp_path)))

    class Stranger(torch.nn.Module):
        def forward(self, input_ids, pixel_values=None, labels=None, **others):
            raise AssertionError("it ran")

    needs = ", ".join(field.name for field in encoder.token_fields)
    refused = re.escape(f"The family {family} needs {needs}, but Stranger.forward does not take it")
    if trainer == "Bridge":
        state = SimpleNamespace(cfg=SimpleNamespace(dataset=SimpleNamespace(run_config=lambda _: run)))
        with pytest.raises(ConfigError, match=refused):
            step.forward_step(state, iter([row.to_bridge()]), Stranger())
        return
    monkeypatch.setattr(gpt, "run_config_of", lambda _: run)
    monkeypatch.setattr("megatron.training.get_args", lambda: None)
    from megatron.core import parallel_state

    with training_run.process_groups():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        text = replace(row, visual_inputs=None, visual_counts={}, pixel_forms={})
        batch = get_batch(iter([text]), whole_row=True)
        with pytest.raises(ConfigError, match=refused):
            gpt.inputs_of(Stranger(), batch)
        parallel_state.destroy_model_parallel()
