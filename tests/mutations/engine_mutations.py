"""The traps of choosing packs and of working in processes; see `mutation_table`."""

from mutation_table import Mutation

ENGINE_TRAPS = {
    145: "the padding of a sample lies between samples where kernels take none, or ends one that sees both ways",
    103: "packs are over a limit, make ranks wait, or differ by processor, and nobody says so",
    104: "a task whose worker died is lost, or is not tried again",
    201: "choosing packs under limits takes longer the longer the rows are, until it holds a training step back",
    248: "easy packs are made first under two limits, and what is scarce is left for packs that waste it",
    202: "the images of a pack take more memory with their padding than any limit counts",
    238: "the cost of a pack is of other pairs of tokens or patches than the model's attention has",
    239: "a part of the model that rests counts as if it worked: frozen, or experts that a token does not choose",
    240: "a simulated pipeline is not the one that Megatron-Core runs",
    241: "the micro-batches of a pipeline come in an order that takes longer than another",
    244: "a run that orders the micro-batches of a global batch sees another order after it resumed",
    246: "a sample of a small data set fills a pack with copies of itself",
    242: "packs are ordered by what another model costs, or by an index that does not hold what the model needs",
    243: "a fit of the steps of a run takes waits for its work, or a rank that waited for the slowest one",
}

BALANCE = "tests/packing/test_balance.py::"
BLENDS = "tests/energon/test_blends.py::"
POLICIES = "tests/packing/test_policies.py::"
PIPELINE = "tests/packing/test_pipeline.py::"
LONG_ROWS = (
    "tests/packing/test_window.py::"
    "test_packs_under_limits_of_a_row_of_a_million_tokens_cost_what_those_of_8192_do[images scarce]"
)
TWO_LIMITS = "tests/packing/test_window.py::test_"
PADDED = "tests/energon/test_padded_pixels.py::"
MEASURE = "tests/offline/test_measure.py::"
FIT = "tests/energon/test_pack_metrics.py::test_a_fit_finds_what_vision_and_language_took_in_the_steps_of_a_run"
MODEL_COST = "tests/packing/test_model_cost.py::"
EXECUTORS = "tests/executors/test_executors.py::"

ENGINE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=246,
        name="a policy is offered every copy that the window holds",
        test=BLENDS + "test_no_pack_has_a_sample_twice_also_of_a_data_set_smaller_than_the_window[2-64-16-None]",
        oracle="the places that Energon names",
        edits=(("packing/online.py", "np.unique(numbers, return_index=True)[1]", "np.arange(len(numbers))"),),
    ),
    Mutation(
        trap=246,
        name="rows of a data set that has fewer samples than a row are as empty as it",
        test=BLENDS + "test_rows_are_full_also_where_a_data_set_or_a_reader_has_fewer_samples_than_a_row[5-200-1]",
        oracle="the width of a row",
        edits=(("packing/online.py", "if copies and not ended and", "if False and"),),
    ),
    Mutation(
        trap=246,
        name="a disjoint buffer is packed with its copies",
        test=BLENDS + "test_no_pack_has_a_sample_twice_also_of_a_data_set_smaller_than_the_window[5-160-16-40]",
        oracle="the places that Energon names",
        edits=(
            (
                "energon/task_encoder.py",
                "dealt(np.array(first_of_same([good[at][0] for at in held])))",
                "[np.arange(len(held))]",
            ),
        ),
    ),
    Mutation(
        trap=246,
        name="equal keys of two data sets are one sample",
        test=BLENDS + "test_a_small_part_of_a_blend_is_in_no_pack_twice_and_equal_keys_of_another_are_other_samples",
        oracle="the places that Energon names",
        edits=(("energon/samples.py", "sample.__sources__ or () if times[sample.__key__] > 1 else", ""),),
    ),
    Mutation(
        trap=103,
        name="costs ascend in every block, none descends",
        test=BALANCE + "test_blocks_rise_and_fall_in_turn",
        oracle="a hand-worked example",
        edits=(("packing/balance.py", "(order if block % 2 == 0 else order[::-1])", "order"),),
    ),
    Mutation(
        trap=103,
        name="the efficiency of a step is that of the slowest step of all",
        test=BALANCE + "test_step_efficiency_is_mean_over_maximum",
        oracle="a hand-worked example",
        edits=(("packing/balance.py", "costs.max(axis=0).sum())", "(costs.max() * costs.shape[1]))"),),
    ),
    Mutation(
        trap=103,
        name="a policy's packs are compared with no limit",
        test=POLICIES + "test_a_policy_that_breaks_a_limit_is_stopped",
        oracle="the definition",
        edits=(("packing/partition.py", "        if over.any():", "        if False:"),),
    ),
    Mutation(
        trap=103,
        name="of equally roomy packs those are chosen that the processor's instructions put first",
        test=POLICIES + "test_packs_under_limits_are_the_same_on_every_processor",
        oracle="NumPy without those instructions",
        edits=(
            (
                "packing/policies/best_fit.py",
                'np.argsort(room, kind="stable")[::-1][:open_]',
                "np.argpartition(-room, open_ - 1)[:open_]",
            ),
        ),
    ),
    Mutation(
        trap=103,
        name="a plan's id and its packs are those of the processor's instructions",
        test="tests/offline/test_planner.py::"
        "test_plans_under_limits_have_one_id_on_processors_with_avx512_with_avx2_and_with_neither",
        oracle="NumPy without those instructions",
        edits=(
            (
                "packing/policies/best_fit.py",
                'np.argsort(-self.columns[members, by], kind="stable")',
                "np.argsort(-self.columns[members, by])",
            ),
        ),
    ),
    Mutation(
        trap=104,
        name="a task is given up when the first worker died at it",
        test=EXECUTORS + "test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others",
        oracle="the notes that each attempt leaves",
        edits=(("executors/work.py", "MOST_DEATHS = 3", "MOST_DEATHS = 1"),),
    ),
    Mutation(
        trap=104,
        name="a task whose worker died is not done again",
        test=EXECUTORS + "test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others",
        oracle="the notes that each attempt leaves",
        edits=(("executors/work.py", "(self._last if suspect else self._again).append(attempt)", "pass"),),
    ),
    Mutation(
        trap=104,
        name="a source that has no task yet is taken to have one",
        test=EXECUTORS + "test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others",
        oracle="the definition",
        edits=(
            (
                "executors/work.py",
                "(task := next(self._new, NOT_YET)) is not NOT_YET",
                "(task := next(self._new, None))",
            ),
        ),
    ),
    Mutation(
        trap=104,
        name="an error that a closed pipe raises, too, is taken for the end of the calling process",
        test=EXECUTORS + "test_an_error_that_a_closed_pipe_raises_too_is_not_taken_for_one[local]",
        oracle="the error of the task",
        edits=(
            (
                "executors/local.py",
                'connection.send(("done", work.do(task)))\n    except Exception as error:\n',
                'connection.send(("done", work.do(task)))\n    except EOFError:\n        return\n'
                "    except Exception as error:\n",
            ),
        ),
    ),
    Mutation(
        trap=104,
        name="a task that waited behind the one at which a worker died is lost",
        test=EXECUTORS + "test_a_task_that_waits_behind_another_is_done_once_whatever_happens_to_its_worker",
        oracle="the numbers squared",
        edits=(("executors/local.py", "attempts.give_back(*worker.given)", "[*map(attempts.done, worker.given)]"),),
    ),
    Mutation(
        trap=104,
        name="an executor that starts its processes anew gets forks",
        test=EXECUTORS + "test_processes_may_begin_anew_instead_of_as_forks_and_do_each_task_once",
        oracle="the command line of the process",
        edits=(("executors/local.py", "multiprocessing.get_context(method)", 'multiprocessing.get_context("fork")'),),
    ),
    Mutation(
        trap=145,
        name="padding lies between samples although it is to end them",
        test="tests/energon/test_rows_of_packs.py::test_padding_ends_its_sample_unless_between_is_asked_for",
        oracle="the definition",
        edits=(("energon/task_encoder.py", 'if self._padding == "real":', 'if self._padding == "both":'),),
    ),
    Mutation(
        trap=145,
        name="padding ends samples of a family whose images see both ways",
        test="tests/energon/test_rows_of_packs.py::test_images_that_see_both_ways_have_padding_between_samples",
        oracle="the mask of Gemma 3 in transformers",
        edits=(("families/gemma3.py", "    causal = False", "    causal = True"),),
    ),
    Mutation(
        trap=201,
        name="under limits every token of a long row is a place of its own",
        test=LONG_ROWS,
        oracle="the same list at 8,192 tokens",
        edits=(
            ("packing/policies/window.py", "-(-room // min(parts, 2 * PLACES // max(cut, 1)))", "1"),
            (
                "packing/policies/window.py",
                "LONG_ROOM, ROOM_PARTS = 32_768, 8_192",
                "LONG_ROOM, ROOM_PARTS = 1 << 30, 1 << 30",
            ),
        ),
    ),
    Mutation(
        trap=201,
        name="lengths are rounded down to parts of a row",
        test=TWO_LIMITS + "packs_under_two_limits_are_at_the_bound_whatever_the_window[18-6016]",
        oracle="the capacity",
        edits=(
            (
                "packing/policies/window.py",
                "min(-(-int(tokens[position]) // part)",
                "min(int(tokens[position]) // part",
            ),
        ),
    ),
    Mutation(
        trap=248,
        name="what is scarce is asked of all that is held, not of the oldest",
        test=TWO_LIMITS + "packs_under_two_limits_are_at_the_bound_whatever_the_window[24-8192]",
        oracle="the lower bound",
        edits=(("packing/policies/window.py", "OLDEST, ASKED = 64", "OLDEST, ASKED = 1 << 20"),),
    ),
    Mutation(
        trap=248,
        name="tokens may not stay free where tiles are scarce",
        test=TWO_LIMITS + "packs_under_two_limits_are_at_the_bound_whatever_the_window[18-6016]",
        oracle="the lower bound",
        edits=(
            ("packing/policies/window.py", "for need in self.needs]", "for need in (max(self.needs), self.needs[1])]"),
        ),
    ),
    Mutation(
        trap=248,
        name="samples that are alike are packed as if they were as small as the smallest",
        test=TWO_LIMITS + "a_long_list_under_two_limits_is_packed_at_the_bound[18-6016]",
        oracle="the capacity",
        edits=(("packing/policies/best_fit.py", "column[runs].max(axis=1)", "column[runs].min(axis=1)"),),
    ),
    Mutation(
        trap=248,
        name="where a limit is broken, one that is used up is forgotten",
        test="tests/packing/test_packing_properties.py::test_no_limit_is_exceeded_where_others_are_used_up_or_zero",
        oracle="the limits",
        edits=(
            ("packing/policies/window.py", "several = rest if len(rest) > 1 else ()", "several: Any = ()"),
            ("packing/policies/window.py", "        return []\n", "        return added\n"),
        ),
    ),
    Mutation(
        trap=202,
        name="images of rows that an older version stored count as changed",
        test="tests/families/test_pixtral_against_processor.py::"
        "test_images_of_rows_that_were_stored_before_plans_had_a_size_are_taken[ministral3]",
        oracle="the processor",
        edits=(
            (
                "families/pixtral.py",
                "[[plan.grid[1] * patch, plan.grid[2] * patch] for plan in plans]",
                "[[*plan.size] for plan in plans]",
            ),
        ),
    ),
    Mutation(
        trap=202,
        name="the padded pixels of a pack of the window have no limit",
        test=PADDED + "test_no_pack_online_is_over_the_limit_and_every_sample_is_emitted_once[packing0-None]",
        oracle="the bytes of the tensors",
        edits=(
            (
                "energon/task_encoder.py",
                "padding=self.limits.padding([sample.measured for sample in held]),",
                "padding=None,",
            ),
        ),
    ),
    Mutation(
        trap=202,
        name="the padded pixels of a pack of a buffer have no limit",
        test=PADDED + "test_no_pack_online_is_over_the_limit_and_every_sample_is_emitted_once[packing2-80]",
        oracle="the bytes of the tensors",
        edits=(
            (
                "energon/task_encoder.py",
                "costs, padding = self.limits.costs(measured), self.limits.padding(measured)",
                "costs, padding = self.limits.costs(measured), None",
            ),
        ),
    ),
    Mutation(
        trap=202,
        name="the padded pixels of a pack of a plan have no limit",
        test=PADDED + "test_no_pack_of_a_plan_is_over_the_limit_and_the_drops_name_it[packing0]",
        oracle="the bytes of the tensors",
        edits=(
            (
                "offline/planner.py",
                "packs = within_padding(packs, units, limits.units, constraints, padding, policy=policy)",
                "pass",
            ),
        ),
    ),
    Mutation(
        trap=202,
        name="a pack over the limit of padded pixels is chosen again from samples of any width",
        test="tests/packing/test_padding_limit.py::"
        "test_tall_images_and_wide_ones_that_would_pad_each_other_are_in_packs_of_their_own",
        oracle="the definition",
        edits=(("packing/online.py", "(shapes[1] <= bound[0]) & (shapes[2] <= bound[1])", "shapes[1] <= bound[0]"),),
    ),
    Mutation(
        trap=202,
        name="texts stay where they are when the images of a plan are parted",
        test="tests/packing/test_padding_limit.py::test_texts_fill_the_packs_whose_images_were_parted",
        oracle="the sum of the lengths",
        edits=(("packing/whole_list.py", 'if policy == "best_fit":', "if False:"),),
    ),
    Mutation(
        trap=202,
        name="one pack over the limit of padded pixels replaces all packs of a policy that keeps an order",
        test="tests/packing/test_padding_limit.py::"
        "test_a_policy_that_keeps_an_order_keeps_the_packs_that_are_within_the_limit",
        oracle="the packs of the policy",
        edits=(("packing/whole_list.py", 'if policy == "best_fit":', "if True:"),),
    ),
    Mutation(
        trap=202,
        name="pieces of a split sample may be over the limit of padded pixels",
        test=PADDED + "test_pieces_of_a_split_sample_are_within_the_limit",
        oracle="the bytes of the tensors",
        edits=(("energon/task_encoder.py", "patches=patches, height=height, width=width)", "patches=patches)"),),
    ),
    Mutation(
        trap=202,
        name="a piece of a split sample is judged by the largest image of the whole sample",
        test=PADDED + "test_a_piece_is_judged_by_its_own_largest_image",
        oracle="the definition",
        edits=(("encoders/splitting.py", "self.shapes[self.media[start] : self.media[end]]", "self.shapes"),),
    ),
    Mutation(
        trap=202,
        name="an index of before has its rows measured already",
        test=PADDED + "test_an_older_index_is_read_without_the_limit_and_measured_again_for_it",
        oracle="the definition",
        edits=(("offline/measure.py", "self._needed = {*shape, *(", "self._needed = {*("),),
    ),
    Mutation(
        trap=238,
        name="windows of a vision model cost what the whole image would",
        test=MODEL_COST
        + "test_forward_operations_are_those_that_pytorch_counts_in_each_half_of_a_model[qwen2_5_vl-wide]",
        oracle="the matrix products that PyTorch counts in the real model",
        edits=(("packing/model_cost.py", "times * rows * columns", "times * patches**2"),),
    ),
    Mutation(
        trap=238,
        name="the blocks of GLM-4V's vision model are as wide as its merger",
        test=MODEL_COST + "test_forward_operations_are_those_that_pytorch_counts_in_each_half_of_a_model[glm4v-small]",
        oracle="the matrix products that PyTorch counts in the real model",
        edits=(("packing/model_cost.py", "out if _kind(vision) in _GLM else inner", "inner"),),
    ),
    Mutation(
        trap=239,
        name="adapters count as a language model that rests where PEFT trains it",
        test="tests/conformance/test_dataset_config.py::test_the_model_of_a_run_costs_what_its_configuration_does_with_"
        "the_parts_frozen_that_bridge_freezes[VLMLoRA that trains language-trained]",
        oracle="what Bridge's VLMLoRA freezes",
        edits=(("bridge/dataset.py", "[it for it in frozen if it ==", "[it for it in PARTS if it =="),),
    ),
    Mutation(
        trap=242,
        name="a state says where the model was, and not what it costs",
        test="tests/energon/test_fingerprint.py::"
        "test_a_cost_is_stated_by_what_it_is_and_only_where_packs_are_ordered_by_it",
        oracle="the definition",
        edits=(("energon/task_encoder.py", "json.dumps(dataclasses.asdict(self.cost))", "self.packing.cost_model"),),
    ),
    Mutation(
        trap=239,
        name="a frozen vision model costs what a trained one does",
        test=MODEL_COST
        + "test_a_step_counts_trained_parts_three_times_and_frozen_ones_as_gradients_pass[llava-vision_model]",
        oracle="the matrix products that PyTorch counts in the real model",
        edits=(("packing/model_cost.py", "(1 + trained[0] + moved[0])", "3"),),
    ),
    Mutation(
        trap=239,
        name="no gradient passes the first matrix of a projection whose norm is trained",
        test=MODEL_COST
        + "test_a_step_counts_trained_parts_three_times_and_frozen_ones_as_gradients_pass[internvl-vision_model]",
        oracle="the matrix products that PyTorch counts in the real model",
        edits=(("packing/model_cost.py", "(trained[1] and family in NORMED)", "False"),),
    ),
    Mutation(
        trap=242,
        name="a plan goes by the constants where the model is known",
        test=MEASURE + "test_a_plan_and_an_online_window_order_packs_by_the_operations_of_the_model",
        oracle="the operations of the rows that the loader makes",
        edits=(
            (
                "offline/planner.py",
                "kind_of_config(config).cost(config).costs(",
                "kind_of_config(config).__class__.__base__.cost(None, None).costs(",
            ),
        ),
    ),
    Mutation(
        trap=242,
        name="an index without squares of patches is not measured again for the cost of a model",
        test=MEASURE + "test_an_index_from_before_squares_is_measured_again_only_for_the_cost_of_a_model",
        oracle="the index that was measured anew",
        edits=(("offline/measure.py", ' or self._needed - {*stored.get("columns", ())}:', ":"),),
    ),
    Mutation(
        trap=243,
        name="waits for packs count as the work of a step",
        test=FIT,
        oracle="the seconds that the test planted",
        edits=(("energon/metrics.py", "begun = now - self._idle", "begun = now"),),
    ),
    Mutation(
        trap=243,
        name="the fastest rank explains how long a step took",
        test=FIT,
        oracle="the seconds that the test planted",
        edits=(("report/steps.py", "(costs @ slope).argmax(axis=1)", "(costs @ slope).argmin(axis=1)"),),
    ),
    Mutation(
        trap=240,
        name="ranks of an interleaved pipeline warm up as those of a plain one",
        test=PIPELINE + "test_each_rank_does_what_megatron_core_does_in_its_order",
        oracle="Megatron-Core's schedule, run with messages that stand still",
        edits=(("packing/pipeline.py", "else 2 * ahead + ", "else ahead + "),),
        needs_bridge=True,
    ),
    Mutation(
        trap=240,
        name="a pass starts before the stage that sends its input is through",
        test=PIPELINE + "test_no_pass_starts_before_what_it_needs_and_ranks_do_one_thing_at_a_time",
        oracle="the definition",
        edits=(("packing/pipeline.py", "waits = [self.place[source]] if source in self.place else []", "waits = []"),),
    ),
    Mutation(
        trap=241,
        name="the last order that was looked at is taken, and not the best",
        test=PIPELINE + "test_up_to_eight_micro_batches_take_within_two_percent_of_the_best_of_all_orders",
        oracle="all orders",
        edits=(("packing/pipeline.py", "if taken.min() < shortest:", "if True:"),),
    ),
    Mutation(
        trap=241,
        name="nothing is exchanged between the sorted orders and the best one",
        test=PIPELINE + "test_more_micro_batches_take_within_five_percent_of_a_bound_that_no_order_goes_below",
        oracle="a bound that no order goes below",
        edits=(("packing/pipeline.py", "if idle > count * count:", "if count:"),),
    ),
    Mutation(
        trap=244,
        name="a run that resumes inside a global batch orders what is left as if it were a batch",
        test="tests/offline/test_planned_loader.py::"
        "test_a_run_that_resumes_after_a_step_or_inside_one_sees_the_order_of_the_run_that_went_on",
        oracle="the run that went on",
        edits=(
            (
                "offline/loader.py",
                "first = self._position + self._rank - self._taken * step",
                "first = self._position + self._rank",
            ),
        ),
    ),
    Mutation(
        trap=244,
        name="a state inside a global batch goes on in another layout",
        test="tests/offline/test_planned_loader.py::"
        "test_a_state_after_a_step_goes_on_in_any_layout_and_one_inside_a_step_only_in_its_own",
        oracle="the definition",
        edits=(
            (
                "offline/loader.py",
                "batches = [*map(self._batch, range(self._pipeline[1] if self._pipeline else 1))]",
                'batches = [state.get("batch", ())]',
            ),
        ),
    ),
    Mutation(
        trap=244,
        name="a pass may end inside a global batch, after which no step is a batch of the loader",
        test="tests/offline/test_planned_loader.py::"
        "test_micro_batches_are_ordered_of_plans_alone_without_end_and_of_a_batch_that_ranks_share",
        oracle="the definition",
        edits=(("offline/loader.py", '(not config.data.repeat, "data.order', '(False, "data.order'),),
    ),
    Mutation(
        trap=244,
        name="a run that forgets its global batch is not ordered, and nobody says so",
        test="tests/offline/test_planned_loader.py::"
        "test_micro_batches_are_ordered_of_plans_alone_without_end_and_of_a_batch_that_ranks_share",
        oracle="the definition",
        edits=(("offline/loader.py", "count < 2 or left,", "count < 1,"),),
    ),
)
