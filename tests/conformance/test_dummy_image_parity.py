"""The dummy image in a real Bridge model: the vision tower runs, loss and gradient stay those of the samples."""

from __future__ import annotations

import pytest
import torch

from energon_packing import thd
from energon_packing.energon.dummy_image import mask_fillers


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_dummy_image_runs_the_vision_tower_and_changes_neither_loss_nor_gradient(
    family, multiple, cpu_world, tiny_provider, make_samples
):
    from support.bridge_cpu import row_parity as parity
    from support.bridge_cpu import training_run

    model = training_run.build_model(tiny_provider(family, seq_length=512))
    samples = make_samples(family, 0)
    rows = [samples.draw("text", length) for length in (23, 40, 2, 17, 64, 9)]
    image = samples.draw("image", (1, 2, 2), text=20)
    dummy = image | {
        "labels": torch.full_like(torch.as_tensor(image["labels"]), thd.IGNORE_INDEX),
        "loss_mask": torch.zeros_like(torch.as_tensor(image["loss_mask"])),
    }
    plain = thd.assemble(rows, multiple=multiple)
    filled = mask_fillers(thd.assemble([*rows, dummy], multiple=multiple), 1)
    assert thd.check_thd(filled, multiple=multiple) == []
    calls = []
    tower = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_model")))
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    expected, gradient = parity.loss_and_gradient(model, [plain.to_bridge()])
    assert not calls
    loss, other = parity.loss_and_gradient(model, [filled.to_bridge()])
    hook.remove()
    assert calls
    assert loss == pytest.approx(expected, abs=1e-6)
    scale = max(float(part.abs().max()) for part in gradient.values())
    assert max(float((gradient[name] - other[name]).abs().max()) for name in gradient) < 1e-5 * scale
    # The same image with its targets is no dummy: the comparison would see it.
    seen, _ = parity.loss_and_gradient(model, [thd.assemble([*rows, image], multiple=multiple).to_bridge()])
    assert abs(seen - expected) > 1e-4
