"""The traps of rows with a context-parallel size of their own; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

SHARING = "tests/packing/test_dynamic_context.py::"
ROWS = "tests/offline/test_shared_rows.py::"
CORE = "tests/conformance/test_dynamic_context_parallel.py::"
ARGUMENTS = "tests/conformance/test_megatron_lm_arguments.py::"
PARTITION = SHARING + "test_each_sample_is_in_one_row_of_aligned_ranks_within_all_limits"
IN_ONE_ROW = ROWS + "test_each_sample_is_in_one_row_that_its_ranks_share[polylithic-8]"
CANNOT_READ = ROWS + "test_a_sample_that_one_rank_cannot_read_stops_all_once_and_is_left_out_afterwards"
CONTEXT, SHARED = "packing/dynamic_context.py", "offline/shared.py"

SHARING_TRAPS = {
    249: "ranks that share a row have it at different places, or one of them has a row less, and all wait for ever",
    250: "a row is aligned or cut for another number of ranks than share it",
    251: "a row of several ranks is longer than they hold, or breaks a limit or promise of packs",
    252: "ranks that share a row leave out different samples",
    253: "a run with rows of their own size goes on at another place, or with other rows",
    254: "steps of a plan for rows of their own size have equal lengths, or rows gain nothing by it",
    255: "what several ranks share is counted once for each of them",
    256: "Megatron-Core packs rows again, or takes padding for tokens",
}

SHARING_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=249,
        name="small blocks of ranks get their samples before large ones",
        test=SHARING + "test_no_rank_waits_before_the_gradients",
        oracle="a simulator in which the ranks of a row wait for each other",
        edits=(
            (
                CONTEXT,
                "    for at in range(len(sizes) - 1, -1, -1):\n        size, members",
                "    for at in range(len(sizes)):\n        size, members",
            ),
        ),
    ),
    Mutation(
        trap=249,
        name="rows of few ranks come before those of many",
        test=PARTITION,
        oracle="the rows of the other ranks at that place",
        edits=((CONTEXT, "zip(sizes[::-1], blocks[::-1], strict=True)", "zip(sizes, blocks, strict=True)"),),
    ),
    Mutation(
        trap=249,
        name="a rank with fewer rows gets none for them",
        test=PARTITION,
        oracle="the number of rows of the other ranks",
        edits=((CONTEXT, "        while len(shared) + len(single) < most:", "        while False:"),),
    ),
    Mutation(
        trap=249,
        name="a replica of one size with fewer packs gets no masked row",
        test=SHARING + "test_static_rows_are_the_packs_of_the_plan",
        oracle="the number of rows of the other ranks",
        edits=((CONTEXT, "own + [SharedRow(size, ())] * (most - len(own)) for own", "own for own"),),
    ),
    Mutation(
        trap=249,
        name="rows are no multiple of what virtual stages take in turn",
        test=PARTITION,
        oracle="the multiple of the domain",
        edits=((CONTEXT, "    most += -most % multiple\n", ""),),
    ),
    Mutation(
        trap=250,
        name="all rows are aligned for one rank",
        test=IN_ONE_ROW,
        oracle="`check_thd` with the multiple of the row's ranks",
        edits=((SHARED, "each.multiple = domain.alignment(size)", "each.multiple = domain.alignment(1)"),),
    ),
    Mutation(
        trap=250,
        name="Bridge's step is not told how many ranks share a row",
        test="tests/conformance/test_dynamic_media.py::"
        "test_rows_of_one_two_and_four_ranks_in_one_step_train_as_rows_of_one_size[installed-whole rows-4]",
        oracle="the gradient with one context-parallel size",
        edits=(
            ("thd/batch.py", "torch.tensor(self.shared[0], dtype=torch.int32)", "torch.tensor(1, dtype=torch.int32)"),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=250,
        name="Megatron-Core is not told how many ranks share a row",
        test=CORE + "test_a_row_without_samples_is_masked_and_media_are_refused",
        oracle="the row's ranks",
        edits=(
            (
                "megatron_lm/dataloader.py",
                "torch.tensor(shared.local_cp_size, dtype=torch.int32)",
                "torch.tensor(1, dtype=torch.int32)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=251,
        name="a sample that is alone has no room for the segment that shows its padding",
        test=SHARING + "test_a_sample_that_is_alone_has_room_for_the_segment_that_shows_its_padding",
        oracle="the rule of `hides_padding`",
        edits=((CONTEXT, "+ hidden * multiple * (not domain.reserved)", "+ 0 * hidden"),),
    ),
    Mutation(
        trap=251,
        name="a row takes samples beyond what its ranks hold",
        test=PARTITION,
        oracle="the domain's tokens",
        edits=(
            (CONTEXT, "if costs[0] <= row[0][0] and", "if"),
            (CONTEXT, "operator.le, costs, row[0]", "operator.le, costs[1:], row[0][1:]"),
        ),
    ),
    Mutation(
        trap=251,
        name="limits of images do not count for rows",
        test=PARTITION,
        oracle="the limit",
        edits=((CONTEXT, "operator.le, costs, row[0]", "operator.le, costs[:1], row[0]"),),
    ),
    Mutation(
        trap=251,
        name="data sets of two groups share rows",
        test=ROWS + "test_data_sets_of_two_groups_and_a_sample_of_two_epochs_share_no_row[polylithic]",
        oracle="the groups of the plan's data sets",
        edits=((CONTEXT, " and row[2] == group and", " and"),),
    ),
    Mutation(
        trap=251,
        name="a sample of two epochs meets itself in a row",
        test=ROWS + "test_data_sets_of_two_groups_and_a_sample_of_two_epochs_share_no_row[polylithic]",
        oracle="the keys of the row",
        edits=((CONTEXT, " and source not in row[3]]", "]"),),
    ),
    Mutation(
        trap=252,
        name="a sample that a rank could not decode in time is dropped on that rank",
        test=CANNOT_READ + "[polylithic-decode_timeout]",
        oracle="the other ranks of the row, which have it",
        edits=((SHARED, "if each.reason not in ONLY_HERE or", "if each.reason in ONLY_HERE or"),),
    ),
    Mutation(
        trap=252,
        name="a sample that ended a decoder stops each run anew",
        test=CANNOT_READ + "[polylithic-decoder_ended]",
        oracle="the next run, which leaves it out",
        edits=((SHARED, "            real.keep_out(data=each.data", "            0 and real.keep_out(data=each.data"),),
    ),
    Mutation(
        trap=252,
        name="the first rank of a row reads the quarantine again when its process begins",
        test=CANNOT_READ + "[polylithic-decode_timeout]",
        oracle="the other ranks, which have read it before",
        edits=(("offline/packs.py", "                quarantined=self.quarantined,\n", ""),),
    ),
    Mutation(
        trap=253,
        name="the position goes on by ranks, not by packs of a global batch",
        test=ROWS + "test_a_state_goes_on_with_other_ranks_at_the_same_global_batch[polylithic-0]",
        oracle="the position of the next global batch",
        edits=(
            (
                SHARED,
                "self._position, self._taken = self._position + self._step, 0",
                "self._position, self._taken = self._position + self._world_size, 0",
            ),
        ),
    ),
    Mutation(
        trap=253,
        name="a state inside a global batch goes on in any layout",
        test=ROWS + "test_a_state_inside_a_global_batch_goes_on_with_the_same_ranks_only[polylithic]",
        oracle="the rows of another layout",
        edits=((SHARED, "return taken if taken and batch == self._batch(taken) else None", "return taken or None"),),
    ),
    Mutation(
        trap=254,
        name="packs are in the order of a fixed size, neighbours in cost",
        test=ROWS + "test_packs_of_a_plan_for_rows_of_their_own_size_are_in_random_order",
        oracle="the correlation of neighbours",
        edits=(
            (
                "offline/planner.py",
                "        if not is_dynamic(config) and rows.size:\n            chosen",
                "        if rows.size:\n            chosen",
            ),
        ),
    ),
    Mutation(
        trap=254,
        name="a size for each row is taken whatever it gains",
        test=SHARING + "test_a_gain_below_three_hundredths_leaves_the_size_fixed",
        oracle="the efficiencies of the simulator",
        edits=((CONTEXT, "both[0] >= (1 + GAIN) * both[1]", "both[0] >= 0 * both[1]"),),
    ),
    Mutation(
        trap=255,
        name="metrics count a row once for each of its ranks",
        test=ROWS + "test_metrics_count_each_sample_once_and_every_rank_has_a_line[polylithic]",
        oracle="the number of samples",
        edits=((SHARED, "pack.counts, pack.dropped, pack.read = False, (), Counter()", "pass"),),
    ),
    Mutation(
        trap=255,
        name="parts of a pack that were made twice count twice in the ledger",
        test=ROWS + "test_the_ledger_counts_each_sample_once_however_ranks_and_sizes_change[polylithic-dynamic]",
        oracle="the samples of the plan",
        edits=(("ledger.py", "for line in _whole(positions[at])]", "for line in positions[at]]"),),
    ),
    Mutation(
        trap=256,
        name="a masked tail counts as tokens for routers",
        test=CORE + "test_padding_and_masked_tails_are_between_segments_for_core[False-lengths0-how0]",
        oracle="the row's own padding mask",
        edits=(("megatron_lm/dataloader.py", "    lengths[:] = 0\n", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=256,
        name="Megatron-Core's scheduler packs rows of a stream again",
        test=ARGUMENTS + "test_a_scheduler_needs_a_plan_of_text",
        oracle="a path that is no plan",
        edits=(("megatron_lm/dataloader.py", "        if not has_global_packs(path):\n", "        if False:\n"),),
        needs_bridge=True,
    ),
)
