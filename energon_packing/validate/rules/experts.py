"""Rules about experts with packed rows: how tokens reach them, and what padding costs them."""

from energon_packing.validate.rules.rule import Finding, bridge, core, rule, unless, warning_rule
from energon_packing.validate.run_view import RunView

HYBRIDEP_CHUNK = 128
"""Tokens per chunk of HybridEP's kernels, DeepEP's default (``NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API``)."""


def _packed_over_hybridep(view: RunView, dispatcher: str = "hybridep") -> bool:
    return view.packed and view.expert_parallel > 1 and view.expert_dispatcher == dispatcher


@rule(
    id="ours/equal-dispatch",
    order=1120,
    checks="every rank gives HybridEP, or an all-gather, as many tokens",
    place="megatron.bridge.models.transformer_config._enable_safe_hybridep_dispatch",
    applies=lambda view: _packed_over_hybridep(view) or _packed_over_hybridep(view, "allgather"),
    sources=(
        core("transformer/moe/token_dispatcher.py", "hidden_states = gather_from_sequence_parallel_region("),
        core("transformer/moe/token_dispatcher.py", "HybridEP dispatch expects equal per-rank input sizes."),
        bridge("models/transformer_config.py", "not capture-safe; those configs require equal inputs."),
    ),
)
def _equal_dispatch(view: RunView) -> Finding | None:
    if view.expert_dispatcher == "allgather":
        why = "moe_token_dispatcher_type is 'allgather', which gathers as many tokens from each rank, but rows differ"
        inside = view.ranks_of_a_row % view.expert_parallel == 0  # slices of one row are equal
        return unless(view.rows_of_one_width or inside, why=why, fix="set moe_token_dispatcher_type to 'alltoall'")
    padded = view.pads_uneven_dispatch or view.cuda_graph_impl == "none"  # without graphs Bridge pads them itself
    return unless(
        view.rows_of_one_width or padded,
        why=f"HybridEP needs equally many tokens from each rank, but rows differ in width, and under cuda_graph_impl "
        f"{view.cuda_graph_impl!r} Bridge does not pad its inputs: the dispatch hangs or mixes tokens up",
        fix="set cuda_graph_impl to 'none'" + ("" if view.as_wide_as_its_samples else ", or pad_to_max_length to true"),
    )


@warning_rule(
    id="ours/hybridep-chunks",
    order=1130,
    checks="each rank gives HybridEP whole chunks",
    place="megatron.core.transformer.moe.fused_a2a.HYBRIDEP_TOKEN_ALIGNMENT (DeepEP#638)",
    applies=_packed_over_hybridep,
    sources=(core("transformer/moe/fused_a2a.py", "HYBRIDEP_TOKEN_ALIGNMENT = 64"),),
)
def _hybridep_chunks(view: RunView) -> Finding | None:
    shards = view.ranks_of_a_row
    if view.rows_of_one_width and view.dataset_seq_length % (HYBRIDEP_CHUNK * shards) == 0:
        return None
    length = view.next_length(HYBRIDEP_CHUNK * shards)
    rows = f"rows of {view.dataset_seq_length} tokens" if view.rows_of_one_width else "rows that differ in width"
    why = (
        f"{rows} are spread over {shards} rank{'s' if shards > 1 else ''}, Megatron-Core pads each rank's tokens to a "
        f"multiple of 64 at most, and the kernels of HybridEP take chunks of {HYBRIDEP_CHUNK} unless told otherwise: "
        "DeepEP before its #638 stops at the first row that is not a multiple of them"
    )
    told = "set the three variables NUM_OF_TOKENS_PER_CHUNK_*_API to 64"
    if view.as_wide_as_its_samples:
        return Finding(why=why, fix=f"{told}, or turn in-batch packing off and pad_to_max_length on")
    return Finding(why=why, fix=f"set pad_to_max_length to true and seq_length to {length}, or {told}")


_capacity_and_padding = warning_rule(
    id="ours/capacity-and-padding",
    order=1140,
    checks="padding does not use up the capacity of experts",
    place="megatron.core.transformer.moe.router.TopKRouter.routing",
    applies=lambda view: view.packed and view.has_experts and (view.expert_capacity_factor or 0) > 0,
    holds=lambda view: view.multiple == 1 and not view.rows_of_one_width,
    sources=(
        core("transformer/moe/router.py", "probs, routing_map = apply_router_token_dropping("),
        core("transformer/moe/router.py", "capacity_factor=self.config.moe_expert_capacity_factor,"),
    ),
    why="moe_expert_capacity_factor is {view.expert_capacity_factor}: experts drop what exceeds their capacity, and "
    "Megatron-Core's router counts padding as tokens, even with a padding mask",
    fix="leave moe_expert_capacity_factor out",
)


@rule(
    id="ours/balance-per-sequence",
    order=1150,
    checks="the balance of experts counts no pack as one sequence",
    place="megatron.core.transformer.moe.router.TopKRouter._apply_seq_aux_loss",
    applies=lambda view: view.packed and view.has_experts and view.load_balancing is not None,
    sources=(core("transformer/moe/router.py", "scores_for_aux_loss = scores_for_aux_loss.reshape(seq_length, -1)"),),
)
def _balance_per_sequence(view: RunView) -> Finding | None:
    # As `energon_packing.thd.routers.count_real_tokens` refuses it of a router.
    names = (view.load_balancing,) if isinstance(view.load_balancing, str) else view.load_balancing or ()
    return unless(
        dict(zip(names, view.balance_coefficients, strict=False)).get("seq_aux_loss", 0.0) <= 0,
        why="moe_router_load_balancing_type is 'seq_aux_loss', which balances each sequence, but a packed row holds "
        "many and would count as one",
        fix="set moe_router_load_balancing_type to 'aux_loss', which is what it would compute, or moe_aux_loss_coeff "
        "to 0",
    )
