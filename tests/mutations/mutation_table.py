"""The traps of packed training, the test that watches each, and the bug that proves that the test watches.

One row a mutation: put the edit in, and the test must fail. Most bugs here were real ones, in the systems that
`docs/correctness.md` names; that page holds this table for readers, and a test compares the two.
"""

from dataclasses import dataclass

TRAPS = {
    1: "changing one segment changes the logits of another",
    2: "positions inside a pack differ from those of the sample alone (1-D and mRoPE)",
    3: "a text-only pack gets constant positions",
    4: "a pack with one segment reuses the boundaries of the pack before it",
    5: "boundaries that are not int32, do not start at 0 or do not increase",
    6: "real and padded boundaries are one array where there is padding",
    7: "padding behind the last sample alone is not seen as padding between sequences",
    8: "padded boundaries at multiple 1, or none where padding is between samples",
    9: "a segment of length zero reaches the context-parallel partitioner",
    10: "`total_tokens` is not set",
    11: "`max_seqlen` does not follow the padding",
    12: "the slices of all context-parallel ranks do not give the row back",
    13: "slices differ from those of Megatron-Core",
    14: "loss and gradient norm differ between context parallelism 1 and 2",
    15: "more context-parallel ranks than images crash",
    16: "the last token of a segment learns the first of the next",
    17: "the packed gradient is not the token-weighted gradient of the unpacked data",
    18: "padding has a label, a weight, or an effect on the losses of a mixture of experts",
    47: "padding after the last segment only, which kernels overlook",
}

MOE = "router functions of Megatron-Core on the rows without padding"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One bug.

    Attributes:
        trap: number in `TRAPS`.
        name: what the bug does, in a few words; unique.
        test: pytest's name of the test that must fail, from the root of the repository.
        oracle: whose answer the test holds ours against.
        edits: ``(file in the package, text that occurs once, text in its place)``.
        needs_bridge: the test is skipped where Megatron-Bridge is not installed.
    """

    trap: int
    name: str
    test: str
    oracle: str
    edits: tuple[tuple[str, str, str], ...]
    needs_bridge: bool = False


ASSEMBLE = "tests/thd/test_assembly.py::"
BATCH = "tests/thd/test_batch.py::"
BRIDGE = "tests/conformance/test_thd_bridge.py::"
GLOO = "tests/conformance/test_gloo_gradients.py::"
TRAP_TESTS = "tests/test_silent_traps.py::"
STEP = "tests/conformance/test_packed_forward_step.py::"

VISIBLE = "tests/thd/test_visible_padding.py::"
LOADED = "tests/energon/test_rows_of_packs.py::"

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=1,
        name="only the outer boundaries reach the model",
        test="tests/conformance/test_bridge_parity.py::"
        "test_changing_one_segment_leaves_the_logits_of_all_others_unchanged[text]",
        oracle="Bridge's model on the row before the change",
        edits=(
            (
                "thd/batch.py",
                'torch.tensor(value, dtype=torch.int32) if name == "max_seqlen" else value',
                'torch.tensor(self.total_tokens, dtype=torch.int32) if name == "max_seqlen" else '
                "value[[0, -1]] if torch.is_tensor(value) else value",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=1,
        name="positions of rows of tokens go on counting",
        test="tests/packing/test_token_rows.py::"
        "test_a_model_sees_each_sequence_alone_only_by_positions_without_cache_and_mask",
        oracle="a model of transformers on each sequence alone",
        edits=(("packing/tokens.py", " - np.repeat(ends[:-1], np.diff(ends))", ""),),
    ),
    Mutation(
        trap=2,
        name="positions go on counting through the row",
        test="tests/thd/test_thd_properties.py::"
        "test_every_assembled_pack_holds_every_invariant_and_unpacks_to_its_rows",
        oracle="the rows themselves",
        edits=(("thd/assembly.py", "positions[..., start:end] = own", "positions[..., start:end] = own + start"),),
    ),
    Mutation(
        trap=2,
        name="text after an image counts on from its rows only",
        test="tests/families/test_families.py::"
        "test_tokens_types_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample[qwen2_5_vl]",
        oracle="`get_rope_index` of Hugging Face",
        edits=(("families/qwen_vl.py", "position += max(rows, columns)", "position += rows"),),
    ),
    Mutation(
        trap=3,
        name="text without media gets the position -1",
        test=TRAP_TESTS + "test_a_text_only_pack_gets_ordinary_positions",
        oracle="counting from 0 in each sample",
        edits=(
            (
                "encoders/encoder.py",
                "np.arange(len(ids), dtype=np.int64)",
                "np.full(len(ids), -1 if not measured.plans else 0, dtype=np.int64)",
            ),
        ),
    ),
    Mutation(
        trap=4,
        name="one boundary array for all packs",
        test=BATCH + "test_a_batch_after_one_with_many_segments_reuses_no_old_boundary",
        oracle="the lengths of the rows",
        edits=(
            (
                "thd/assembly.py",
                "real = np.cumsum([0, *lengths, *last], dtype=np.int32)",
                'real = globals().setdefault("_kept", np.cumsum([0, *lengths, *last], dtype=np.int32))',
            ),
        ),
    ),
    Mutation(
        trap=5,
        name="boundaries are int64",
        test=ASSEMBLE + "test_boundaries_are_int32_start_at_zero_and_increase_to_the_end_of_the_row",
        oracle="the definition",
        edits=(
            (
                "thd/assembly.py",
                "real = np.cumsum([0, *lengths, *last], dtype=np.int32)",
                "real = np.cumsum([0, *lengths, *last], dtype=np.int64)",
            ),
        ),
    ),
    Mutation(
        trap=5,
        name="the check accepts boundaries that do not start at 0",
        test=BATCH + "test_a_corrupted_batch_is_reported_under_the_name_of_its_invariant",
        oracle="a corrupted batch for each invariant",
        edits=(("thd/checks.py", "if boundaries[0] != 0:", "if boundaries[0] < 0:"),),
    ),
    Mutation(
        trap=6,
        name="real boundaries sum physical lengths",
        test=ASSEMBLE + "test_real_and_padded_boundaries_are_two_arrays_that_differ_where_there_is_padding",
        oracle="the lengths of the rows",
        edits=(
            (
                "thd/assembly.py",
                "real = np.cumsum([0, *lengths, *last], dtype=np.int32)",
                "real = np.cumsum([0, *physical, *last], dtype=np.int32)",
            ),
        ),
    ),
    Mutation(
        trap=7,
        name="padding is looked for before the last sample only",
        test=ASSEMBLE + "test_padding_only_at_the_tail_counts_as_padding_between_sequences",
        oracle="Transformer Engine's definition",
        edits=(
            (
                "thd/batch.py",
                '"pad_between_seqs": batch.pad_between_seqs',
                '"pad_between_seqs": padded is not None and bool((padded[:-1] != batch.cu_seqlens[:-1]).any())',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=8,
        name="padded boundaries always",
        test=ASSEMBLE + "test_multiple_one_emits_no_padded_boundaries",
        oracle="Bridge's in-batch packer",
        edits=(
            (
                "thd/assembly.py",
                "torch.from_numpy(places) if multiple > 1 else None",
                "torch.from_numpy(places)",
            ),
        ),
    ),
    Mutation(
        trap=8,
        name="padded boundaries only where something is padded",
        test=ASSEMBLE + "test_a_multiple_above_one_emits_padded_boundaries_even_where_nothing_is_padded",
        oracle="Bridge's in-batch packer",
        edits=(
            (
                "thd/assembly.py",
                "torch.from_numpy(places) if multiple > 1 else None",
                "torch.from_numpy(places) if width != int(lengths.sum()) else None",
            ),
        ),
    ),
    Mutation(
        trap=9,
        name="the partitioner takes empty segments",
        test=BATCH + "test_no_zero_length_or_uneven_segment_reaches_the_partitioner",
        oracle="Transformer Engine's contract",
        edits=(("thd/context_parallel.py", "- starts).min() <= 0:", "- starts).min() < 0:"),),
    ),
    Mutation(
        trap=10,
        name="the mapping for Bridge lacks total_tokens",
        test=ASSEMBLE + "test_total_tokens_is_the_length_of_the_row",
        oracle="the row itself",
        edits=(("thd/fields.py", '    "total_tokens": ("total_tokens",),', '    "total_tokens": (),'),),
    ),
    Mutation(
        trap=10,
        name="PackedSeqParams gets the real tokens as total",
        test=BRIDGE + "test_every_token_of_any_row_belongs_to_the_segment_that_holds_it",
        oracle="`PackedSeqParams.__post_init__` of Megatron-Core",
        edits=(
            (
                "thd/batch.py",
                "    if not total_tokens:\n",
                '    values["total_tokens"] = batch.real_tokens\n    if not total_tokens:\n',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=11,
        name="max_seqlen of the real lengths",
        test=ASSEMBLE + "test_max_seqlen_follows_the_padding_and_the_tail",
        oracle="the longest difference of physical boundaries",
        edits=(("thd/assembly.py", "max_seqlen=max(int(physical.max()), tail)", "max_seqlen=int(lengths.max())"),),
    ),
    Mutation(
        trap=12,
        name="the second piece of a rank is one too early",
        test=BATCH + "test_the_slices_of_all_ranks_give_back_every_token_field",
        oracle="the whole batch",
        edits=(("thd/context_parallel.py", "(pieces - 1 - cp_rank) * size", "(pieces - 2 - cp_rank) * size"),),
    ),
    Mutation(
        trap=12,
        name="mRoPE positions are cut, not gathered",
        test=BATCH + "test_the_slices_of_all_ranks_give_back_every_token_field",
        oracle="the whole batch",
        edits=(
            (
                "thd/context_parallel.py",
                "parts = {name: tensor.index_select(-1, indices) for name, tensor in batch.token_tensors.items()}",
                "parts = {n: t.chunk(cp_size, -1)[cp_rank] if t.dim() == 3 else t.index_select(-1, indices)"
                " for n, t in batch.token_tensors.items()}",
            ),
        ),
    ),
    Mutation(
        trap=13,
        name="a rank holds two neighbouring pieces",
        test=BRIDGE + "test_each_segment_is_sliced_as_megatron_core_slices_a_sequence",
        oracle="`get_batch_on_this_cp_rank` of Megatron-Core",
        edits=(
            ("thd/context_parallel.py", "starts + cp_rank * size", "starts + 2 * cp_rank * size"),
            ("thd/context_parallel.py", "starts + (pieces - 1 - cp_rank) * size", "starts + (2 * cp_rank + 1) * size"),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=14,
        name="loss weights are cut, not gathered",
        test=GLOO + "test_loss_and_gradient_norm_are_equal_with_and_without_context_parallelism",
        oracle="the same step with CP 1, two and four processes",
        edits=(
            (
                "thd/context_parallel.py",
                "    return _with_token_tensors(batch, parts, cp_size=cp_size, cp_rank=cp_rank)",
                '    parts["loss_mask"] = batch.loss_mask.chunk(cp_size, -1)[cp_rank]\n'
                "    return _with_token_tensors(batch, parts, cp_size=cp_size, cp_rank=cp_rank)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=15,
        name="images are shared out over the ranks",
        test=GLOO + "test_more_context_parallel_ranks_than_images_train_as_one_process_does",
        oracle="each sample alone, in one process",
        edits=(
            (
                "thd/context_parallel.py",
                "    return _with_token_tensors(batch, parts, cp_size=cp_size, cp_rank=cp_rank)",
                "    own = {n: t.chunk(cp_size)[cp_rank] for n, t in (batch.visual_inputs or {}).items()} or None\n"
                "    return _with_token_tensors(batch, parts, cp_size=cp_size, cp_rank=cp_rank, visual_inputs=own)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=16,
        name="targets at the end of a sample are taken",
        test=ASSEMBLE + "test_the_last_token_of_a_segment_is_never_supervised_by_the_first_of_the_next",
        oracle="the definition",
        edits=(("thd/assembly.py", "    verify_targets(keys, starts, lengths, labels, loss_mask)\n", ""),),
    ),
    Mutation(
        trap=16,
        name="the encoder shifts labels round the end",
        test=TRAP_TESTS + "test_no_token_of_a_pack_of_conversations_learns_the_next_conversation",
        oracle="the token ids of the sample",
        edits=(
            (
                "encoders/encoder.py",
                "labels = np.where(learned, np.roll(ids, -1), IGNORE_INDEX)",
                "labels = np.roll(ids, -1)",
            ),
        ),
    ),
    Mutation(
        trap=17,
        name="every pack is averaged over its own weights",
        test=GLOO + "test_the_packed_gradient_is_the_weighted_gradient_of_the_unpacked_data",
        oracle="each sample alone, in one process",
        edits=(
            (
                "thd/assembly.py",
                "    verify_targets(keys, starts, lengths, labels, loss_mask)\n",
                "    verify_targets(keys, starts, lengths, labels, loss_mask)\n"
                "    loss_mask *= np.float32(1024.0) / loss_mask.sum()\n",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=17,
        name="samples are weighed by the square of their share",
        test=GLOO + "test_the_packed_gradient_is_the_weighted_gradient_of_the_unpacked_data",
        oracle="each sample alone, in one process",
        edits=(("encoders/targets.py", "math.sqrt(targets)", "targets**2"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=18,
        name="padding is labelled",
        test=ASSEMBLE + "test_padding_has_no_label_no_weight_and_is_marked",
        oracle="the definition",
        edits=(
            (
                "thd/assembly.py",
                "labels = np.full(width, IGNORE_INDEX, dtype=np.int64)",
                "labels = np.full(width, pad_token_id, dtype=np.int64)",
            ),
        ),
    ),
    Mutation(
        trap=18,
        name="padding_mask is True at content",
        test=ASSEMBLE + "test_padding_has_no_effect_on_the_router_losses_of_megatron_core",
        oracle=MOE,
        edits=(
            (
                "thd/assembly.py",
                "padding_mask=torch.from_numpy(padding)[None]",
                "padding_mask=torch.from_numpy(~padding)[None]",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=18,
        name="our forward step drops the padding mask, as Bridge's does",
        test=STEP + "test_padding_changes_nothing_in_a_mixture_of_experts_with_our_step_and_does_with_bridges"
        "[text-8-False-<lambda>]",
        oracle="the same rows without padding, trained by Bridge with experts",
        edits=(("thd/routers.py", "    setattr(params, _ON_PARAMS, mask)\n", "    pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=18,
        name="a mask that the model made of the boundaries stays, though they call the masked rest of a row a sample",
        test=STEP + "test_experts_get_the_mask_of_the_row_and_not_one_that_the_model_makes_of_the_boundaries",
        oracle="the row's own mask, in a layer called as Qwen3-VL of Bridge 0.7 calls it",
        edits=(
            (
                "thd/routers.py",
                "is None:\n        return None\n    # Replaces",
                "is None or keywords.get('padding_mask') is not None:\n        return None\n    # Replaces",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=18,
        name="the router gets the mask of another rank's tokens",
        test=STEP + "test_every_rank_gets_the_mask_of_its_own_tokens",
        oracle="the whole row's mask at the rank's positions",
        edits=(
            (
                "bridge/step.py",
                "mask = mask.index_select(1, indices)",
                "mask = mask.chunk(cp, dim=1)[groups.cp.rank()]",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=47,
        name="a sample alone gets no masked segment",
        test=VISIBLE + "test_random_rows_hide_no_padding_and_the_cut_over_ranks_gives_each_sample_its_own_attention",
        oracle="each sample's own attention; Transformer Engine's cut over ranks, emulated",
        edits=(("thd/assembly.py", "hidden = hides_padding(lengths.tolist(), multiple)", "hidden = False"),),
    ),
    Mutation(
        trap=47,
        name="the last sample's place takes the rest of a fixed width",
        test=VISIBLE + "test_a_row_is_wholly_aligned_or_shows_its_padding_before_its_last_segment",
        oracle="Transformer Engine's comparison",
        edits=(
            (
                "thd/assembly.py",
                "    tail = width - occupied\n",
                "    tail = hidden = 0\n    physical[-1] += width - occupied\n",
            ),
        ),
    ),
    Mutation(
        trap=47,
        name="a pack keeps the order in which it was chosen",
        test=LOADED + "test_every_row_of_the_loader_shows_its_padding_and_none_exceeds_the_row",
        oracle="Transformer Engine's comparison",
        edits=(("thd/assembly.py", "        order[-2:] = reversed(order[-2:])\n", "        pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=47,
        name="the capacity leaves no room for the masked segment",
        test=LOADED + "test_a_sample_that_fills_its_row_but_for_the_masked_segment_is_too_long",
        oracle="the row's length",
        edits=(
            (
                "packing/constraints.py",
                "return hidden * self.lone_room",
                "return 0",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=47,
        name="a restored pack has another order than the one that was emitted",
        test=LOADED + "test_a_pack_made_again_from_its_restore_key_has_the_order_of_the_first",
        oracle="the pack before the restore",
        edits=(
            (
                "energon/window.py",
                "zip(*(members[at] for at in order), strict=True)",
                "zip(*((*members[at][:1], *members[n][1:]) for n, at in enumerate(order)), strict=True)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=47,
        name="a move to the device makes two boundary tensors of one",
        test=BATCH + "test_boundaries_without_padding_are_one_tensor_wherever_the_batch_has_been",
        oracle="Transformer Engine 2.18: distinct tensors count as padding",
        edits=(
            (
                "thd/batch.py",
                'if spec.name == "cu_seqlens_padded" and value is self.cu_seqlens:',
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=47,
        name="the forward step leaves the guess to the kernel",
        test=STEP + "test_the_model_is_told_whether_samples_are_padded_and_need_not_guess",
        oracle="the lengths of the rows",
        edits=(("bridge/step.py", "            params.pad_between_seqs = padded\n", "            pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=47,
        name="the check accepts hidden padding",
        test=BATCH + "test_a_corrupted_batch_is_reported_under_the_name_of_its_invariant",
        oracle="a corrupted batch for each invariant",
        edits=(("thd/checks.py", "    if real[-1] != physical[-1] and", "    if False and"),),
    ),
    Mutation(
        trap=47,
        name="fixed boundaries of an aligned row are two tensors on a device",
        test=BATCH + "test_fixed_boundary_arrays_without_padding_stay_one_tensor_where_nothing_can_be_compared",
        oracle="one tensor, as Transformer Engine 2.18 asks",
        edits=(("thd/batch.py", "repeat_last(padded) if batch.pad_between_seqs else real", "repeat_last(padded)"),),
    ),
    Mutation(
        trap=47,
        name="a video alone gets no masked clip",
        test="tests/conformance/test_wan_in_bridge.py::test_no_pack_of_videos_hides_its_padding_from_either_attention",
        oracle="Transformer Engine's comparison",
        edits=(("wan/pack.py", 'int(hides_padding(deciding, multiple) and compat != "bridge")', "0"),),
        needs_bridge=True,
    ),
)
