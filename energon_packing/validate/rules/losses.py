"""Rules about what a packed run's loss sums: weights of tokens, and shifted labels.

Nothing else reports these before GPUs are taken. Imports neither torch nor Bridge.
"""

from __future__ import annotations

from energon_packing.validate.rules.rule import Finding, SourceLine, bridge_is_silent_on_loss, rule
from energon_packing.validate.run_view import RunView


def _packed_and_bridge_is_silent_on_loss(view: RunView) -> bool:
    return view.packed and bridge_is_silent_on_loss(view) and not view.packs_natively


def _packed_not_natively(view: RunView) -> bool:
    return view.packed and not view.packs_natively  # for its own packing Bridge reports it: bridge/native-*


def _weighted(view: RunView) -> bool:
    return view.dataset_kind == "packed_energon" and view.loss.loss_weighting not in (None, "token")


@rule(
    id="ours/token-weight",
    checks="a token weighs the same in every pack",
    place="Bridge's development branch asks it of its own online packing at any CP",
    applies=_packed_and_bridge_is_silent_on_loss,
    severity="warning",
    sources=(
        SourceLine(
            file="megatron/core/pipeline_parallel/schedules.py", says="output_tensor /= torch.clamp(num_tokens, min=1)"
        ),
    ),
)
def _tokens_weigh_the_same(view: RunView) -> Finding | None:
    if view.loss.calculate_per_token_loss:
        return None
    return Finding(
        why="calculate_per_token_loss is false: each pack weighs the same, however few tokens it trains, "
        "so a token in a pack of long prompts weighs more",
        fix="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True},
    )


@rule(
    id="ours/no-multi-token-prediction",
    checks="no multi-token prediction over packed rows",
    place="megatron.core.transformer.multi_token_prediction.roll_tensor",
    applies=_packed_not_natively,
    sources=(
        SourceLine(
            file="megatron/core/transformer/multi_token_prediction.py",
            says="cu_seqlens = packed_seq_params.cu_seqlens_q",
        ),
    ),
)
def _no_multi_token_prediction(view: RunView) -> Finding | None:
    # Megatron-Core shifts labels at the real boundaries (roll_tensor): correct if there is no padding between samples.
    if view.loss.mtp_num_layers == 0 or (view.bridge_release >= (0, 7) and view.multiple == 1):
        return None
    reason = (
        f"Megatron-Bridge {view.versions.bridge_version or '0.6'} documents it as unsupported over packed rows"
        if view.multiple == 1
        else "Megatron-Core shifts its labels at cu_seqlens_q, the real boundaries; after the first padded sample "
        "they lie elsewhere, and labels come from other samples"
    )
    return Finding(
        why=f"mtp_num_layers is {view.loss.mtp_num_layers}: {reason}",
        fix="set mtp_num_layers to 0",
        changes={"mtp_num_layers": 0},
    )


@rule(
    id="ours/weights-need-token-loss",
    checks="weighted losses are divided by the weights of the whole step",
    place="energon_packing.encoders.weighting",
    applies=_weighted,
    sources=(SourceLine(file="energon_packing/encoders/weighting.py", says="divided by the sum of the weights."),),
)
def _weights_need_token_loss(view: RunView) -> Finding | None:
    if view.loss.calculate_per_token_loss:
        return None
    return Finding(
        why=f"loss_weighting is {view.loss.loss_weighting!r}, whose weights are to be divided by their sum over the "
        "step, but calculate_per_token_loss is false: each pack would divide by its own sum",
        fix="set training.calculate_per_token_loss to true",
        changes={"calculate_per_token_loss": True, "average_in_collective": False},
    )
