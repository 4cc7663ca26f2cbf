"""The traps of plans and stored packs; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

COMMAND = "tests/offline/test_pack_command.py::"
LOADER = "tests/offline/test_planned_loader.py::"
ROWS = "tests/offline/test_stored_rows.py::test_a_row_is_read_back_bit_for_bit_and_as_part_of_a_pack"
CLIPS = "tests/wan/test_clip_limits.py::"
ORDER = "tests/offline/test_order.py::"
SHARES = "tests/offline/test_blend.py::"
EVALUATIONS = "tests/offline/test_evaluation.py::"
BLENDS = "tests/offline/test_blend_of_a_metadataset.py::"
MEASURED = "tests/offline/test_measure.py::"
PLANNER = "tests/offline/test_planner.py::"
MOVED = MEASURED + "test_a_data_set_at_another_place_replaces_its_entry_and_takes_its_turn[moved]"
SPLITS = MEASURED + "test_a_plan_has_the_split_that_is_named_and_never_another_beside_it"
EDITED = BLENDS + "test_an_edited_metadataset_drops_its_old_parts_also_under_another_name_and_says_so"
NOTHING = SHARES + "test_a_data_set_with_a_share_of_which_nothing_fits_is_refused_by_name"
LIMITS = "tests/offline/test_array_limits.py::test_every_number_is_that_of_pack_limits"
PARQUET = (
    "tests/conformance/test_bridge_parquet.py::"
    "test_bridge_reads_the_tokens_targets_and_boundaries_of_every_pack_of_the_plan_in_order[2]"
)
DIFFERS = COMMAND + "test_a_pack_that_differs_from_its_source_is_named_with_sample_and_field[polylithic]"

OFFLINE_TRAPS = {
    60: "a stored pack is not the planned one, and nothing says so",
    61: "a shard that is damaged, half written, or of other data or another plan is taken for whole",
    62: "the packs of a plan depend on ranks or on where a run continues, or are longer than their row",
    66: "a plan of a metadataset mixes its data sets otherwise than the metadataset does, and nothing says so",
    90: "after the last pack of a plan the same packs come in the same order, and most of a data set never does",
    91: "two evaluations have different samples, or those of one differ with the ranks or after a restart",
    118: "the sizes told of packed rows, or the number of their boundaries, are not theirs",
    210: "a run trains on a split that nobody chose",
    211: "the same samples are planned twice, or those that a metadataset no longer names",
    212: "a data set with a share is not in the plan, and nothing says so",
    213: "more is dropped from a plan, or from its packs, than the budget allows",
    214: "a plan of moved data is another plan",
    223: "a reader of a plan reads rows of hundreds of packs for each of its own",
    224: "the media of a pack are read one after the other, each when it is asked for",
    222: "each of a thousand `pack` commands reads what others have packed, or all of the plan",
    221: "what `measure` and `plan` send to workers, or look up, grows with the shards of all, or with who works",
    220: "the steps of a plan are uneven where an epoch has fewer packs than `max_data_parallel`, or in what is left",
    247: "a sample that an epoch has several times meets itself in a planned pack",
    92: "an evaluation has a sample twice, or lacks one of a split that it has room for",
    215: "a run reads packs that hold more than its own limits allow",
    217: "an index or a plan that another command replaced is taken for the one that was opened",
    218: "a file from before a setting holds today's default, not what was done then",
    219: "verify takes a plan, an index or Bridge's files for whole that are not",
    216: "media of a plan are others than those that were measured, and nothing says so",
    245: "ranks wait for each other after the vision tower, because packs are ordered by one cost",
}

OFFLINE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=247,
        name="what is drawn several times is packed with its copies",
        test=SHARES + "test_no_planned_pack_has_a_sample_twice_however_often_it_is_drawn[limits1-plan1]",
        oracle="the rows of the plan",
        edits=(
            ("offline/planner.py", "parts, padding = dealt(numbers),", "parts, padding = [np.arange(len(sizes))],"),
        ),
    ),
    Mutation(
        trap=247,
        name="the window of a plan is offered every copy",
        test=SHARES + "test_no_planned_pack_has_a_sample_twice_however_often_it_is_drawn[limits1-plan1]",
        oracle="the rows of the plan",
        edits=(("offline/planner.py", "sliding_packs(numbers, units", "sliding_packs(np.arange(len(numbers)), units"),),
    ),
    Mutation(
        trap=223,
        name="the row groups of a plan are as large as they may be",
        test="tests/offline/test_planner.py::test_a_reader_of_one_pack_reads_few_rows_of_others",
        oracle="the rows of the file",
        edits=(("offline/planner.py", "min(max(plan_file.LEAST_ROWS,", "max(max(plan_file.LEAST_ROWS,"),),
    ),
    Mutation(
        trap=224,
        name="the media of a sample are announced when it is rendered",
        test=LOADER + "test_media_of_a_pack_are_announced_to_the_kernel_in_the_order_of_their_places_before_one_is_read"
        "[polylithic-packed]",
        oracle="the calls of the system",
        edits=(("offline/stored_pack.py", "(read_media, stores[id(sample)])", "(read_media, self._media(sample, 0))"),),
    ),
    Mutation(
        trap=224,
        name="the media of a pack are announced in the order of its samples",
        test=LOADER + "test_media_of_a_pack_are_announced_to_the_kernel_in_the_order_of_their_places_before_one_is_read"
        "[polylithic-plan]",
        oracle="the places in the plan",
        edits=(("offline/source.py", "sorted(self.expected)", "list(self.expected)"),),
    ),
    Mutation(
        trap=222,
        name="every command opens the finished shards of all",
        test=COMMAND + "test_a_command_of_many_looks_at_its_own_part_and_compares_no_plan_byte_by_byte[polylithic]",
        oracle="the shards of the command",
        edits=(
            (
                "offline/shared_work.py",
                "    _look(there, share, results, directories)\n",
                "    _look(there, tasks, results, directories)\n",
            ),
        ),
    ),
    Mutation(
        trap=222,
        name="every command reads all of the plan to divide it",
        test=COMMAND + "test_a_command_of_many_looks_at_its_own_part_and_compares_no_plan_byte_by_byte[polylithic]",
        oracle="the rows of its shards",
        edits=(("offline/pack.py", "self.stored_firsts() or shard_firsts(", "shard_firsts("),),
    ),
    Mutation(
        trap=221,
        name="each shard that is given to a worker comes with the names of all",
        test="tests/offline/test_measure.py::test_a_shard_that_is_given_to_a_worker_names_no_other_shard[polylithic]",
        oracle="the names of the others",
        edits=(("offline/measure.py", "replace(part, shards=())", "part"),),
    ),
    Mutation(
        trap=221,
        name="samples that were measured again are put beside those that another process did",
        test=LOADER + "test_samples_that_are_measured_again_by_several_processes_make_the_same_plan[polylithic]",
        oracle="the plan of one process",
        edits=(("offline/packs.py", "[made[number] for number in range(len(shards))]", "[*made.values()][::-1]"),),
    ),
    Mutation(
        trap=220,
        name="what an epoch has too many for whole groups is one shuffle",
        test=ORDER
        + "test_small_epochs_and_what_is_left_of_large_ones_have_even_steps_in_every_epoch_and_pass[1-242-0.98]",
        oracle="the costs of the steps",
        edits=(
            (
                "offline/order.py",
                "parts.append(_shuffled_inside(_close(tail[None, at : at + size], table), random).ravel())",
                "parts.append(random.permutation(tail[at : at + size]))",
            ),
        ),
    ),
    Mutation(
        trap=220,
        name="an epoch goes on with packs of any cost where the one before it has begun a group",
        test=ORDER + "test_a_group_that_two_epochs_share_has_packs_of_similar_cost[1-0.95]",
        oracle="the costs of the group",
        edits=(("offline/order.py", "size, known[:, -begun:].mean(axis=1))", "size, table.min(axis=1))"),),
    ),
    Mutation(
        trap=245,
        name="a plan orders packs by the sum of both costs",
        test=PLANNER + "test_packs_of_a_step_cost_the_vision_tower_nearly_the_same_and_the_language_model_too",
        oracle="both costs of the packs, from the plan",
        edits=(
            (
                "offline/planner.py",
                "balanced_order(pack_costs, group=wide, before=before,",
                "balanced_order(pack_costs.sum(axis=1), group=wide, before=before.sum(axis=1),",
            ),
        ),
    ),
    Mutation(
        trap=245,
        name="each of two costs counts by its own mean, however little one of them is",
        test=ORDER + "test_a_cost_that_is_next_to_nothing_takes_next_to_nothing_from_the_other",
        oracle="the costs of the steps in the order of the sum",
        edits=(("offline/order.py", "means if means.min() >= LITTLE * means.sum() else means.sum()", "means"),),
    ),
    Mutation(
        trap=245,
        name="parts of an epoch are cut by the first cost alone",
        test=ORDER + "test_tiles_are_even_within_a_thousandth_and_tokens_within_a_hundredth[tiles]",
        oracle="the costs of the steps",
        edits=(("offline/order.py", "costs.mean(axis=2), axis=0)[0] > 0", "costs.mean(axis=2), axis=0)[0] > np.inf"),),
    ),
    Mutation(
        trap=245,
        name="steps in a row are level in one of their two costs",
        test=ORDER + "test_the_mean_of_any_32_steps_is_near_that_of_the_whole[d32-0-2]",
        oracle="the costs of the steps",
        edits=(("offline/order.py", "abs(x + steps[left[at]][0])", "0.0"),),
    ),
    Mutation(
        trap=220,
        name="in a later pass what is left of groups is one shuffle",
        test=ORDER
        + "test_small_epochs_and_what_is_left_of_large_ones_have_even_steps_in_every_epoch_and_pass[1-242-0.98]",
        oracle="the costs of the steps",
        edits=(("offline/order.py", "    if older:\n", "    if True:\n"),),
    ),
    Mutation(
        trap=90,
        name="a state of an older version goes on in the order of this one",
        test=LOADER
        + "test_the_passes_after_the_plan_are_the_same_from_stored_packs_and_for_any_ranks_and_after_a_restart"
        "[polylithic]",
        oracle="the order of that version",
        edits=(("offline/loader.py", 'and state.get("order") == OLDER', "and False"),),
    ),
    Mutation(
        trap=118,
        name="the sizes beside Bridge's packed files count tokens, where Bridge counts positions",
        test=PARQUET,
        oracle="Bridge's `create_packing_strategy` on the same packs",
        edits=(("offline/formats/bridge_parquet.py", "np.diff([*starts, end]) - 1", "np.diff([*starts, end])"),),
    ),
    Mutation(
        trap=62,
        name="build_loader reads the plan as rank 0 on every rank",
        test="tests/offline/test_packed_loader.py::test_build_loader_opens_a_plan_and_its_packs_too[polylithic]",
        oracle="`open_loader` of the plan",
        edits=(
            ("energon/loader.py", "opened(config, prefetch=prefetch, **given, **arguments)", "opened(config, **given)"),
        ),
    ),
    Mutation(
        trap=61,
        name="a metadata.json that was there before is written over",
        test="tests/conformance/test_bridge_parquet.py::test_what_bridges_form_cannot_hold_is_refused_by_name",
        oracle="the file's own bytes",
        edits=(("offline/formats/bridge_parquet.py", "if ours & found else ours)", "if True else ours)"),),
    ),
    Mutation(
        trap=61,
        name="Parquet files of another plan are taken for those of this one",
        test="tests/offline/test_pack_command.py::"
        "test_packs_of_every_format_are_made_once_by_any_ranks_and_go_on_where_they_stopped[bridge-parquet]",
        oracle="the packs of the other plan",
        edits=(
            (
                "offline/formats/bridge_parquet.py",
                'if {"packs": own["packs"], **(read_metadata(path) or {})} != own:',
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=118,
        name="a stored row keeps the number of its boundaries where the run fixes it",
        test=PARQUET,
        oracle="the row from the plan, and Bridge's packed data set with pad_cu_seqlens",
        edits=(("offline/stored_pack.py", "self._encoder.with_boundaries_of_run(batch)", "batch"),),
    ),
    Mutation(
        trap=66,
        name="the weights of a blend are not measured",
        test=BLENDS + "test_a_plan_has_the_weights_of_the_blend_that_was_measured",
        oracle="the weights that the metadataset says",
        edits=(("offline/source.py", "                weight=leaf.weight,\n", "                weight=None,\n"),),
    ),
    Mutation(
        trap=66,
        name="a blend inside a blend has the weight of its file alone",
        test=BLENDS + "test_nested_blends_have_the_shares_that_energon_gives_them",
        oracle="Energon's own data sets of the metadataset",
        edits=(("validate/looks/data.py", "weight=above * value / total)", "weight=value / total)"),),
    ),
    Mutation(
        trap=66,
        name="a subset of a data set is measured whole",
        test=BLENDS + "test_a_subset_is_refused_because_the_whole_data_set_would_be_measured[list]",
        oracle="the metadataset's subset",
        edits=(("offline/source.py", "        if leaf.subset:\n", "        if False:\n"),),
    ),
    Mutation(
        trap=61,
        name="the rest of a run is planned from the index of another data set",
        test="tests/offline/test_state_convert.py::"
        "test_states_that_cannot_be_counted_are_refused_in_a_sentence[polylithic]",
        oracle="another data set whose shards have the same names",
        edits=(("offline/planner.py", '["index_uuid"] != left.uuid', '["index_uuid"] is None'),),
    ),
    Mutation(
        trap=60,
        name="labels are stored as the tokens that follow, whatever they are",
        test=ROWS,
        oracle="the row before it was stored",
        edits=(("offline/stored_pack.py", "if not np.array_equal(_following(tokens, weights), labels):", "if False:"),),
    ),
    Mutation(
        trap=60,
        name="positions on three axes are stored as if they counted",
        test=ROWS,
        oracle="the row before it was stored",
        edits=(
            (
                "offline/stored_pack.py",
                "    if not np.array_equal(np.broadcast_to(_counted(",
                "    if len(positions) == 1 and not np.array_equal(np.broadcast_to(_counted(",
            ),
        ),
    ),
    Mutation(
        trap=60,
        name="a pack made anew is compared, and the difference forgotten",
        test=DIFFERS,
        oracle="a shard whose token was changed",
        edits=(("offline/verify.py", "            if difference is not None:\n", "            if False:\n"),),
    ),
    Mutation(
        trap=60,
        name="verify counts the samples of a pack, and does not compare them with the plan",
        test=DIFFERS,
        oracle="a shard whose samples changed places",
        edits=(("offline/plan.py", "if names != expected:", "if len(names) != len(expected):"),),
    ),
    Mutation(
        trap=61,
        name="verify believes the checksum that a shard states",
        test=COMMAND + "test_what_is_whole_is_verified_and_every_flipped_byte_is_found[polylithic]",
        oracle="a flipped bit in every file",
        edits=(("offline/verify.py", "if shard.digest() != shard.checksum:", "if False:"),),
    ),
    Mutation(
        trap=61,
        name="training believes the bytes of a stored pack",
        test=COMMAND + "test_training_stops_at_a_pack_whose_bytes_changed_and_names_it[polylithic]",
        oracle="a flipped bit in every pack",
        edits=(("offline/shards.py", "if zlib.crc32(record[:CHECKED]) != self._sums[number]:", "if False:"),),
    ),
    Mutation(
        trap=61,
        name="a directory of other packs is continued",
        test=COMMAND + "test_another_plan_or_other_settings_are_refused_by_name_and_nothing_changes[polylithic]",
        oracle="the files before",
        edits=(
            (
                "offline/formats/shards.py",
                '{name: value}, {name: self.facts.settings[name]}, {"encoder": self._older}',
                "{}, {}",
            ),
        ),
    ),
    Mutation(
        trap=61,
        name="what was written aside stays when writing fails",
        test=COMMAND + "test_a_full_disk_and_a_read_only_place_are_one_sentence_and_nothing_half_written[polylithic]",
        oracle="the files of the directory",
        edits=(("offline/files.py", "        aside.unlink(missing_ok=True)\n", "        pass\n"),),
    ),
    Mutation(
        trap=61,
        name="a source shard that grew since it was measured is read",
        test=COMMAND
        + "test_a_source_that_is_missing_or_changed_is_refused_by_name_and_no_half_shard_is_left[polylithic]",
        oracle="the size that was measured",
        edits=(
            (
                "offline/packs.py",
                '(size != identity["bytes"], f"{size}',
                '(False, f"{size}',
            ),
        ),
    ),
    Mutation(
        trap=62,
        name="a rank reads the packs of the first one",
        test=LOADER + "test_any_number_of_ranks_and_workers_reads_the_same_global_packs[polylithic-2-0]",
        oracle="one rank without workers",
        edits=(("offline/loader.py", "first = self._position + self._rank - ", "first = self._position - "),),
    ),
    Mutation(
        trap=62,
        name="a state counts the packs of its own rank",
        test=LOADER
        + "test_a_state_of_any_rank_continues_with_other_ranks_and_workers_at_the_same_pack[polylithic-3-2-1]",
        oracle="a run that never stopped",
        edits=(("offline/loader.py", "self._position += self._world_size", "self._position += 1"),),
    ),
    Mutation(
        trap=62,
        name="a clip that is alone in a planned pack has no room for the text of the masked clip after it",
        test=CLIPS + "test_every_number_of_clips_is_that_of_clip_limits",
        oracle="the limits of the online loader",
        edits=(("offline/samples.py", "fits &= cost + alone <= limits", "fits &= cost <= limits"),),
    ),
    Mutation(
        trap=62,
        name="the last clip of a planned pack hides the padding of its text",
        test=CLIPS + "test_clips_of_planned_packs_are_in_the_order_of_the_online_loader",
        oracle="the order of the online loader",
        edits=(("offline/planner.py", "    if sizes.text_tokens is not None:", "    if False:"),),
    ),
    Mutation(
        trap=62,
        name="a plan counts lengths without their alignment",
        test=LIMITS,
        oracle="the limits of the online loader",
        edits=(
            (
                "packing/constraints.py",
                "units: int = -(-first // self.multiple) - (-second // self.multiple)",
                "units: int = first // self.multiple + second // self.multiple",
            ),
        ),
    ),
    Mutation(
        trap=90,
        name="a plan that holds a data set in part comes again",
        test=LOADER + "test_a_plan_that_ends_in_the_middle_of_a_data_set_ends_its_run_on_all_ranks_at_the_same_step",
        oracle="the definition: every sample before one comes again",
        edits=(("offline/loader.py", "        unfinished=too_short(plan),", "        unfinished=None,"),),
    ),
    Mutation(
        trap=90,
        name="the ranks that have a pack in the last step of a plan get it, and the others refuse",
        test=LOADER + "test_a_plan_that_ends_in_the_middle_of_a_data_set_ends_its_run_on_all_ranks_at_the_same_step",
        oracle="equal numbers of packs",
        edits=(
            (
                "offline/loader.py",
                "return len(self._packs) - (len(self._packs) - self._position) % self._step",
                "return len(self._packs)",
            ),
        ),
    ),
    Mutation(
        trap=90,
        name="every pass has the order of the plan",
        test=SHARES
        + "test_later_passes_have_the_packs_of_each_epoch_in_other_orders_and_keep_those_of_a_step_together",
        oracle="the definition",
        edits=(("offline/packs.py", "        if position < self._packs:", "        if True:"),),
    ),
    Mutation(
        trap=90,
        name="a share too small for the summary counts as none",
        test=SHARES + "test_a_plan_may_come_again_if_it_goes_through_each_data_set_a_whole_number_of_times",
        oracle="fractions worked out by hand",
        edits=(("offline/plan.py", "if turns and (not round(turns) or abs", "if turns and (abs"),),
    ),
    Mutation(
        trap=91,
        name="a plan has to suffice for the steps that are left, wherever they begin in it",
        test=SHARES + "test_a_plan_has_to_suffice_from_where_the_run_continues",
        oracle="the definition: its position and what is left",
        edits=(
            (
                "offline/open_loader.py",
                "too_short(plan_behind(path), position + packs)",
                "too_short(plan_behind(path), packs)",
            ),
        ),
    ),
    Mutation(
        trap=91,
        name="an evaluation begins where the last one ended",
        test=EVALUATIONS
        + "test_each_evaluation_has_the_same_packs_on_any_ranks_and_workers_and_after_a_restart[plan.parquet]",
        oracle="the first evaluation",
        edits=(("offline/loader.py", "else position % period", "else position"),),
    ),
    Mutation(
        trap=91,
        name="each rank evaluates on a split of its own",
        test=EVALUATIONS + "test_each_evaluation_has_the_same_packs_on_any_ranks_and_workers_and_after_a_restart[a]",
        oracle="the evaluation of one rank",
        edits=(
            (
                "offline/open_loader.py",
                "build_dataset(replace(run, data=own),",
                "build_dataset(replace(run, data=replace(own, seed=rank)),",
            ),
        ),
    ),
    Mutation(
        trap=91,
        name="Bridge's evaluations are counted with the batch of the training",
        test="tests/conformance/test_bridge_training.py::"
        "test_every_evaluation_of_bridge_reports_the_loss_on_the_same_packs_and_so_does_the_next_run",
        oracle="Bridge's own evaluate",
        edits=(("bridge/provider.py", "(settings.eval_iters, batch", "(1 + settings.eval_iters, batch"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=92,
        name="a plan comes again within an evaluation",
        test=EVALUATIONS
        + "test_an_evaluation_with_room_for_the_whole_split_has_each_sample_once_and_then_only_padding[plan.parquet]",
        oracle="the records in the tars",
        edits=(("offline/loader.py", "            packs.passes = None\n", "            pass\n"),),
    ),
    Mutation(
        trap=92,
        name="what the window holds at the end of a split is never evaluated",
        test=EVALUATIONS
        + "test_an_evaluation_with_room_for_the_whole_split_has_each_sample_once_and_then_only_padding[a]",
        oracle="the records in the tars",
        edits=(("offline/open_loader.py", "        if not held:\n", "        if ended or not held:\n"),),
    ),
    Mutation(
        trap=92,
        name="what an evaluation drops is in no ledger",
        test=EVALUATIONS + "test_the_ledger_of_an_evaluation_names_each_dropped_sample_once_over_all_ranks",
        oracle="the samples that are too long",
        edits=(("offline/open_loader.py", "        yield [*dropped, *(", "        yield [*("),),
    ),
    Mutation(
        trap=92,
        name="an evaluation of a blend of bad data is searched for ever",
        test=EVALUATIONS
        + "test_an_evaluation_of_bad_data_is_refused_when_the_loader_is_built_and_never_searched_for_ever"
        "[0.0-drop_budget=0.0 allows-c]",
        oracle="the samples that are too long",
        edits=(
            (
                "offline/open_loader.py",
                "                account_for(sample, ledger)\n                dropped",
                "                dropped",
            ),
        ),
    ),
    Mutation(
        trap=92,
        name="each reader measures the split of an evaluation by itself",
        test=EVALUATIONS
        + "test_one_rank_measures_a_split_and_tells_the_others_who_wait_longer_than_a_collective_of_the_run",
        oracle="a clock, and the packs of one reader",
        edits=(
            (
                "offline/open_loader.py",
                '        arguments["places"] = replica.told(lambda: (own_loader(), arguments["places"])[1])\n',
                "        pass\n",
            ),
        ),
    ),
    Mutation(
        trap=210,
        name="a plan takes every split that its indexes hold",
        test=SPLITS,
        oracle="the names of the shards",
        edits=(("offline/samples.py", "if (not splits and len(held) > 1) or not", "if not"),),
    ),
    Mutation(
        trap=210,
        name="a plan of a named split has the others beside it",
        test=SPLITS,
        oracle="the names of the shards",
        edits=(("offline/samples.py", "if not splits or each[1].asked in splits]", "if True]"),),
    ),
    Mutation(
        trap=210,
        name="a run that names no split reads a plan of any",
        test=SPLITS,
        oracle="the names of the shards",
        edits=(
            (
                "offline/loader.py",
                "split or (config.data.split if noted else None), free, ",
                "split, free, ",
            ),
        ),
    ),
    Mutation(
        trap=210,
        name="an older plan of several splits is one of each",
        test=MEASURED + "test_a_plan_of_several_splits_from_before_they_were_noted_is_refused",
        oracle="the names of the splits",
        edits=(("offline/plan.py", "(held if len(held) == 1 else set())", "held"),),
    ),
    Mutation(
        trap=210,
        name="the parts of an older metadataset count as those of their own splits",
        test=BLENDS + "test_weights_are_those_of_the_split_that_was_asked_for_whatever_splits_its_parts_have",
        oracle="the metadataset",
        edits=(("offline/index.py", "(splits[it.path] == 1 or", "(True or"),),
    ),
    Mutation(
        trap=211,
        name="data that moved are measured beside their old place",
        test=MOVED,
        oracle="the samples of the first plan",
        edits=(("offline/measure.py", "same = of_records.get(it.records) or of_place.get(", "same = of_place.get("),),
    ),
    Mutation(
        trap=211,
        name="data that moved come last in the index",
        test=MOVED,
        oracle="the id of the first plan",
        edits=(
            (
                "offline/measure.py",
                "tuple((placed | named).values())",
                "tuple(({name: it for name, it in placed.items() if name not in named} | named).values())",
            ),
        ),
    ),
    Mutation(
        trap=211,
        name="a copy in another index is planned a second time",
        test=MOVED,
        oracle="the samples of the first plan",
        edits=(
            (
                "offline/samples.py",
                "held = (*dataset.records, (dataset.root, dataset.split))",
                "held = ((dataset.root, dataset.split),)",
            ),
        ),
    ),
    Mutation(
        trap=211,
        name="a part that its metadataset no longer names stays",
        test=EDITED,
        oracle="the metadataset",
        edits=(("offline/measure.py", "                del placed[it.name]\n", "                pass\n"),),
    ),
    Mutation(
        trap=211,
        name="the parts of a metadataset with a new name stay under the old one",
        test=EDITED,
        oracle="the metadataset",
        edits=(("offline/measure.py", "named_by.setdefault(it.path, same.path)", "pass"),),
    ),
    Mutation(
        trap=212,
        name="the share of a data set of which nothing fits goes to the others",
        test=NOTHING + r"[plan0-gold \\(/data/gold\\) has weight 3, but none of its 12 samples]",
        oracle="the samples of the index",
        edits=(("offline/planner.py", 'asked not in ("epochs 1", "weight 0")', "False"),),
    ),
    Mutation(
        trap=212,
        name="the share that is told is of the rows, whatever the weights count",
        test=SHARES + "test_a_plan_tells_what_each_data_set_gives_and_which_share_it_asked_for_and_reached[tokens]",
        oracle="the tokens of the packs",
        edits=(("offline/planner.py", 'counted["reached"] = times * amount', 'counted["reached"] = times'),),
    ),
    Mutation(
        trap=213,
        name="a plan of few samples may drop them all",
        test=PLANNER + "test_over_a_known_population_the_budget_is_the_share_itself[1-198-0.1-True]",
        oracle="the share of the samples",
        edits=(("offline/planner.py", "over_budget(lost, read, budget, looks=0)", "over_budget(lost, read, budget)"),),
    ),
    Mutation(
        trap=213,
        name="packs of few samples may lose them all",
        test="tests/offline/test_packed_loader.py::"
        "test_packing_that_drops_more_than_the_budget_stops_however_few_the_samples_are[polylithic]",
        oracle="the media that were overwritten",
        edits=(
            (
                "offline/formats/shards.py",
                "over_budget(drops.total(), samples, budget, looks=0)",
                "over_budget(drops.total(), samples, budget)",
            ),
        ),
    ),
    Mutation(
        trap=213,
        name="the budget counts a data set once that an epoch reads several times",
        test=PLANNER + "test_the_budget_counts_what_the_epochs_read_of_each_data_set",
        oracle="the samples of the epochs",
        edits=(("offline/planner.py", 'if times := each["per_epoch"]:', 'if times := float(each["per_epoch"] > 0):'),),
    ),
    Mutation(
        trap=214,
        name="the paths that plan.datasets names are part of a plan's id",
        test=MOVED,
        oracle="the id of the first plan",
        edits=(("offline/planner.py", "    if resolved:  #", "    if False:  #"),),
    ),
    Mutation(
        trap=214,
        name="plan.datasets of a plan names what only the directory of `plan` knows",
        test=SHARES + "test_a_plan_is_the_same_wherever_it_is_looked_at[.]",
        oracle="the plan that names the data set shortly",
        edits=(("offline/planner.py", "if it not in names and os.path.abspath(it) in names", "if not it"),),
    ),
    Mutation(
        trap=214,
        name="the difference of two plans goes by paths",
        test=MOVED,
        oracle="the samples of the first plan",
        edits=(
            (
                "offline/explain.py",
                "zip(sorted(records[0] & records[1]), itertools.count())",
                "zip((), itertools.count())",
            ),
        ),
    ),
    Mutation(
        trap=215,
        name="a limit of the run counts only where the plan has one too",
        test="tests/offline/test_packed_loader.py::"
        "test_a_limit_of_the_run_that_is_tighter_than_the_plans_is_refused_by_name[polylithic-max_segments_per_pack]",
        oracle="the limits of the run",
        edits=(("offline/loader.py", "most is None or own < most", "most is not None and own < most"),),
    ),
    Mutation(
        trap=216,
        name="media of a plan are told apart by the index of their data set alone",
        test="tests/offline/test_packed_loader.py::"
        "test_media_that_changed_since_they_were_measured_end_the_run_by_name[polylithic-plan-0]",
        oracle="the bytes of the shards",
        edits=(("offline/packs.py", "if not is_same(now, before):", "if False:"),),
    ),
    Mutation(
        trap=216,
        name="packs with media by reference read whatever lies in their places",
        test="tests/offline/test_packed_loader.py::"
        "test_media_that_changed_since_they_were_measured_end_the_run_by_name[polylithic-tokens-0]",
        oracle="the bytes of the shards",
        edits=(("offline/packed.py", "        check_media(dataset", "        (dataset"),),
    ),
    Mutation(
        trap=216,
        name="what was measured stays though the media changed",
        test="tests/offline/test_measure.py::"
        "test_media_that_changed_are_measured_again_and_an_older_index_is_not[polylithic]",
        oracle="the times and sizes of the shards",
        edits=(("offline/measure.py", "        if changed:", "        if False:"),),
    ),
    Mutation(
        trap=216,
        name="rows that name no media are taken for true though the index holds them no more",
        test="tests/offline/test_measure.py::"
        "test_media_that_changed_are_measured_again_and_an_older_index_is_not[polylithic]",
        oracle="the command that measured them",
        edits=(("offline/measure.py", "self.known.get(name))) is None", "self.known.get(name, {}))) is None"),),
    ),
    Mutation(
        trap=216,
        name="all media of a data set are compared for each of its shards",
        test="tests/offline/test_measure.py::"
        "test_media_that_changed_are_measured_again_and_an_older_index_is_not[polylithic]",
        oracle="what was looked at",
        edits=(("offline/measure.py", "self.known[name] = changed", "pass"),),
    ),
    Mutation(
        trap=217,
        name="a plan is not compared with the one that was opened when a worker reads it",
        test=LOADER + "test_a_plan_that_was_replaced_under_its_run_is_not_read_as_the_old_one[polylithic-0]",
        oracle="the packs of both plans",
        edits=(("offline/plan.py", "if mark.encode() not in known:", 'if mark == "":'),),
    ),
    Mutation(
        trap=217,
        name="two encoders begin one index",
        test="tests/offline/test_measure.py::"
        "test_a_command_of_another_encoder_that_begins_the_same_index_is_refused_before_it_measures",
        oracle="the index of one command alone",
        edits=(("offline/measure.py", "if not before.fingerprint:", "if False:"),),
    ),
    Mutation(
        trap=218,
        name="transparent images of older files count as shown on white",
        test="tests/offline/test_old_files.py::"
        "test_files_from_before_settings_are_read_as_their_code_read_them[a-packing0]",
        oracle="rows of commit 436f816",
        edits=(("config/encoder.py", 'setting("white", before="processor")', 'setting("white")'),),
    ),
    Mutation(
        trap=218,
        name="pairs of older packs are trained by a run that refuses pairs",
        test="tests/offline/test_old_files.py::test_todays_default_is_refused_where_it_is_not_what_was_done",
        oracle="rows of commit 436f816",
        edits=(("offline/stored_pack.py", "        counted.check(", "        (lambda *_: None)("),),
    ),
    Mutation(
        trap=218,
        name="a packed directory from before a setting is another packing",
        test="tests/offline/test_old_files.py::"
        "test_a_packed_directory_from_before_settings_goes_on_as_it_was_begun[tokens]",
        oracle="files of commit 436f816",
        edits=(("offline/formats/shards.py", "self._older | settings if", "settings if"),),
    ),
    Mutation(
        trap=219,
        name="the id of a plan is taken for right",
        test=COMMAND + "test_a_row_of_a_plan_that_is_a_copy_of_another_is_found_wherever_the_plan_lies[polylithic]",
        oracle="the plan as it was written",
        edits=(("offline/verify.py", "if facts.id not in (plan_id", "if '' in (plan_id"),),
    ),
    Mutation(
        trap=219,
        name="keys of a plan are in no digest",
        test=COMMAND + "test_a_row_of_a_plan_that_is_a_copy_of_another_is_found_wherever_the_plan_lies[polylithic]",
        oracle="the plan as it was written",
        edits=(("offline/plan.py", '("key", "offset", "size", *', '("offset", "size", *'),),
    ),
    Mutation(
        trap=219,
        name="the manifest of packs is believed",
        test=COMMAND + "test_settings_of_a_packed_directory_that_somebody_changed_are_found[polylithic]",
        oracle="the settings in the shards",
        edits=(("offline/verify.py", "for name, said, stored in differing(", "for name, said, stored in () and ("),),
    ),
    Mutation(
        trap=219,
        name="Bridge's files that are missing at the end are not missed",
        test="tests/conformance/test_bridge_parquet.py::"
        "test_verify_finds_what_is_missing_or_damaged_among_bridges_files",
        oracle="the files of `pack`",
        edits=(("offline/verify.py", 'if known.get("packs", stop) != stop:', "if False:"),),
    ),
)
