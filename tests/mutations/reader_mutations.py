"""The traps of what each reader reads; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

SHARES = "tests/energon/test_reader_shares.py::"
EQUALLY = SHARES + "test_short_and_long_samples_are_seen_equally_often_and_ranks_have_as_many_packs"

READER_TRAPS = {
    86: "samples are drawn by the length of their neighbours, and ranks run out of packs at different steps",
    87: "a small data set of a blend is left out on ranks that have none of its samples",
    88: "a split of fewer samples than readers fails at the first evaluation, on some ranks only",
    89: "a sample is given twice or never where the samples are dealt to readers, or after a restore",
}

READER_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=86,
        name="each reader gets one stretch of the source",
        test=EQUALLY + "[length-2-0]",
        oracle="how often each key was given",
        edits=(
            (
                "energon/reader_shares.py",
                "    return bounds, reader_of\n",
                "    return bounds, np.arange(rows * readers) // rows\n",
            ),
        ),
    ),
    Mutation(
        trap=86,
        name="chunks are dealt in turns, whatever period the source has",
        test=EQUALLY + "[foreign-4-0]",
        oracle="how often each key was given",
        edits=(
            (
                "energon/reader_shares.py",
                "    return bounds, reader_of\n",
                "    return bounds, np.arange(rows * readers) % readers\n",
            ),
        ),
    ),
    Mutation(
        trap=86,
        name="every data set gives its last samples to the same readers",
        test=SHARES + "test_many_small_data_sets_leave_no_reader_with_less_than_another",
        oracle="the samples of each rank, counted",
        edits=(("energon/reader_shares.py", "longest=longest, held=dealt, number=number)", "longest=longest)"),),
    ),
    Mutation(
        trap=86,
        name="images that are stored apart count as nothing",
        test=SHARES + "test_ranks_of_a_finite_epoch_have_as_many_tokens_where_images_are_stored_apart",
        oracle="tokens of the packs of each rank",
        edits=(("energon/reader_shares.py", "        if media:\n", "        if False:\n"),),
    ),
    Mutation(
        trap=86,
        name="stats counts a repeated data set once in what readers have",
        test="tests/report/test_stats.py::test_readers_have_the_tokens_that_loaders_of_their_ranks_give[None]",
        oracle="tokens of the packs of each rank",
        edits=(("report/stats.py", "own_tokens * repetitions / share.copies", "own_tokens"),),
    ),
    Mutation(
        trap=87,
        name="small data sets are divided among the readers too",
        test=SHARES + "test_each_data_set_of_a_blend_has_its_share_on_any_number_of_readers[8-0]",
        oracle="the weights of the blend",
        edits=(("energon/reader_shares.py", "epoch < LEAST * readers\n", "False\n"),),
    ),
    Mutation(
        trap=87,
        name="repetitions are left to the readers that have a sample",
        test=SHARES + "test_repetitions_in_a_blend_hold_on_any_number_of_readers[8-20]",
        oracle="the repetitions of the blend",
        edits=(("energon/reader_shares.py", "        if copies > 1:  # a reader", "        if False:  # a reader"),),
    ),
    Mutation(
        trap=88,
        name="a small split is divided among the readers, so that some have nothing to repeat",
        test=SHARES + "test_a_split_smaller_than_the_readers_is_read_by_all_of_them[4-2]",
        oracle="the keys of the split",
        edits=(("energon/reader_shares.py", "epoch < LEAST * readers\n", "False\n"),),
    ),
    Mutation(
        trap=88,
        name="a reader that has nothing of a finite blend asks Energon for it",
        test=SHARES + "test_a_reader_that_has_nothing_of_a_finite_blend_has_no_packs",
        oracle="the keys of the blend",
        edits=(("energon/window.py", "self.dataset if self.dataset.worker_has_samples() else ()", "self.dataset"),),
    ),
    Mutation(
        trap=88,
        name="a split without samples ends in a worker",
        test=SHARES + "test_a_split_without_samples_is_refused_when_the_loader_is_built",
        oracle="the definition",
        edits=(
            (
                "energon/reader_shares.py",
                "if each.endless is not None and not (each.samples if each.factory.subset else each.usable):",
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=89,
        name="a restored sample is looked up by Energon's number",
        test=SHARES + "test_a_state_of_dealt_samples_continues_exactly_after_every_pack[60-2-0]",
        oracle="the packs of the uninterrupted loader",
        edits=(
            (
                "energon/reader_shares.py",
                "_get_sample(loader, restore_key[-1])",
                "_get_sample(loader, loader.share.sample(restore_key[-1]))",
            ),
        ),
    ),
    Mutation(
        trap=89,
        name="a subset is dealt from the beginning of its data set",
        test=SHARES + "test_a_subset_is_dealt_whole_and_nothing_else_of_its_data_set",
        oracle="the keys of the subset",
        edits=(("energon/reader_shares.py", "return self.first + (self.places[at]", "return (self.places[at]"),),
    ),
    Mutation(
        trap=89,
        name="a state of other shares is restored",
        test=SHARES + "test_a_state_is_refused_where_other_samples_are_a_readers",
        oracle="the definition",
        edits=(("energon/task_encoder.py", "**readers, **dealt_identity(dataset)}", "**readers}"),),
    ),
)
