"""The traps of plans that are made in bands; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

TESTS = "tests/offline/test_bands.py::"
EVERY = TESTS + "test_bands_have_each_sample_as_often_as_the_plan_in_one_piece_and_none_twice_before_all"
NAMED = TESTS + "test_what_is_missing_damaged_or_of_another_plan_is_named"
PIECES = TESTS + "test_pieces_of_split_samples_are_in_one_band_and_are_measured_once"
BANDS, PLAN = "offline/bands.py", "offline/plan.py"

BAND_TRAPS = {
    261: "a sample at the border of two bands is in both of them or in neither",
    262: "a band has another mix, or other lengths, than the whole",
    263: "steps, or later passes, break at the border of two bands",
    264: "a plan that was cut off, is damaged or has a part of another one is read",
    265: "what became of samples that were measured again is lost between two readings of the index",
}

BAND_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=261,
        name="bands that meet in a shard divide it by different permutations",
        test=EVERY,
        oracle="how often the plan in one piece has each sample",
        edits=((BANDS, "(dataset, turn, 2, shard), low, high", "(dataset, turn, 2, shard, len(wanted)), low, high"),),
    ),
    Mutation(
        trap=261,
        name="a band leaves out the shard in which it begins",
        test=EVERY,
        oracle="how often the plan in one piece has each sample",
        edits=((BANDS, 'int(np.searchsorted(after, low, side="right"))', "int(np.searchsorted(before, low))"),),
    ),
    Mutation(
        trap=262,
        name="bands take whole shards, however different these are",
        test=TESTS + "test_bands_of_shards_that_are_sorted_by_length_have_the_mix_of_all_and_are_as_full[3]",
        oracle="the mean of all samples",
        edits=((BANDS, "min(math.ceil(units / rows.size), math.ceil(apart))", "1"),),
    ),
    Mutation(
        trap=262,
        name="every band reads all shards",
        test=TESTS + "test_a_band_of_many_alike_shards_reads_few_of_them_and_each_once",
        oracle="the number of shards",
        edits=((BANDS, "min(math.ceil(units / rows.size), math.ceil(apart))", "math.ceil(apart)"),),
    ),
    Mutation(
        trap=263,
        name="the first group of a band does not go on with that of the band before",
        test=TESTS + "test_steps_are_balanced_over_the_borders_of_bands",
        oracle="a random order",
        edits=(("offline/planner.py", "                    before = packs.unfinished\n", ""),),
    ),
    Mutation(
        trap=263,
        name="bands of a later pass change places, and their packs are looked for where they were",
        test=TESTS + "test_later_passes_have_each_pack_once_and_keep_those_of_a_step_together[1]",
        oracle="the packs of the plan",
        edits=(
            ("offline/packs.py", "order_again(*bands[place], position", "order_again(*sorted(bands)[place], position"),
        ),
    ),
    Mutation(
        trap=264,
        name="the rows of a band are not compared with what was written",
        test=TESTS + "test_rows_that_were_changed_are_found",
        oracle="the rows that were written",
        edits=(
            (
                "offline/verify.py",
                "if part is not None and (rows_digest(own), content.hexdigest()) != (part.digest, part.content):",
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=264,
        name="the manifest of an old plan stays while a new one is written over it",
        test=TESTS + "test_a_plan_that_was_cut_off_is_not_complete_and_the_next_command_replaces_it[True]",
        oracle="the plan that is asked for",
        edits=(
            (
                "offline/planner.py",
                "        if not self._parts:\n            self.clear()\n",
                "        if not self._parts:\n            self._out.mkdir(exist_ok=True)\n",
            ),
        ),
    ),
    Mutation(
        trap=265,
        name="pieces of split samples are in no band",
        test=PIECES,
        oracle="the pieces that were made",
        edits=(("offline/samples.py", "again.take(own)), table.select", "again.take(slice(0))), table.select"),),
    ),
)
