"""The traps of choosing packs and of working in processes; see `mutation_table`."""

from mutation_table import Mutation

ENGINE_TRAPS = {
    145: "the padding of a sample lies between samples where kernels take none, or ends one that sees both ways",
    103: "packs are over a limit, make ranks wait, or differ by processor, and nobody says so",
    104: "a task whose worker died is lost, or is not tried again",
    201: "choosing packs under limits takes longer the longer the rows are, until it holds a training step back",
    248: "easy packs are made first under two limits, and what is scarce is left for packs that waste it",
    202: "the images of a pack take more memory with their padding than any limit counts",
}

BALANCE = "tests/packing/test_balance.py::"
POLICIES = "tests/packing/test_policies.py::"
LONG_ROWS = (
    "tests/packing/test_window.py::"
    "test_packs_under_limits_of_a_row_of_a_million_tokens_cost_what_those_of_8192_do[images scarce]"
)
TWO_LIMITS = "tests/packing/test_window.py::test_"
PADDED = "tests/energon/test_padded_pixels.py::"
EXECUTORS = "tests/executors/test_executors.py::"

ENGINE_MUTATIONS: tuple[Mutation, ...] = (
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
        edits=(("executors/work.py", "MOST_DEATHS = 2", "MOST_DEATHS = 1"),),
    ),
    Mutation(
        trap=104,
        name="a task whose worker died is not done again",
        test=EXECUTORS + "test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others",
        oracle="the notes that each attempt leaves",
        edits=(("executors/work.py", "        self._again.append(attempt)", "        pass"),),
    ),
    Mutation(
        trap=104,
        name="a source that has no task yet is taken to have one",
        test=EXECUTORS + "test_results_in_order_wait_for_a_slow_first_task_with_a_bounded_number_of_others",
        oracle="the definition",
        edits=(("executors/work.py", "None if task is NOT_YET else Attempt(task)", "Attempt(task)"),),
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
        edits=(("executors/local.py", "                        attempts.give_back(*worker.given)\n", ""),),
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
        edits=(("packing/policies/window.py", "OLDEST = 64", "OLDEST = 1 << 20"),),
    ),
    Mutation(
        trap=248,
        name="tokens may not stay free where tiles are scarce",
        test=TWO_LIMITS + "packs_under_two_limits_are_at_the_bound_whatever_the_window[18-6016]",
        oracle="the lower bound",
        edits=(("packing/policies/window.py", "max(1 - self.needs[0] / top - chance, 0.0)", "0.0"),),
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
                "padding=self.limits.padding([samples[at].measured for at in held]),",
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
        "test_a_policy_that_keeps_an_order_keeps_the_packs_that_are_within_the_limit[next_fit]",
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
        edits=(("offline/measure.py", '"subflavors": plain, **self._more}', '"subflavors": plain}'),),
    ),
)
