"""The rule about where a model's weights come from. Imports neither torch nor Bridge."""

from __future__ import annotations

from energon_packing.validate.rules.rule import Finding, SourceLine, rule
from energon_packing.validate.run_view import RunView


def _fine_tunes(view: RunView) -> bool:
    """Whether the run trains on conversations and says where its weights come from; our YAML names no model."""
    return view.dataset_kind == "packed_energon" and view.network.has_weights is not None


@rule(
    id="ours/initial-weights",
    checks="training on conversations begins with trained weights",
    place="recipes of Bridge name no checkpoint; its finetune() asks for one, its pretrain() draws weights at random",
    applies=_fine_tunes,
    severity="warning",
    sources=(
        SourceLine(
            file="megatron/bridge/training/finetune.py",
            says="Finetuning requires a loading from a pretrained checkpoint or resuming from a checkpoint",
        ),
    ),
)
def _initial_weights(view: RunView) -> Finding | None:
    if view.network.has_weights:
        return None
    return Finding(
        why="the run names no weights to begin with (checkpoint.pretrained_checkpoint, or a checkpoint in "
        "checkpoint.load), so the model begins with random ones",
        fix="set checkpoint.pretrained_checkpoint to a checkpoint that Bridge imported, or to the model's Hugging Face "
        "directory",
    )
