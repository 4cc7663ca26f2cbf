"""The trap of pages and figures that show another run or sample than there is; see `mutation_table`."""

from mutation_table import Mutation

SEE_TRAPS = {
    63: "a figure or page shows packs that were not trained, hides a dead rank, or runs what a sample says",
    126: "the first hour ends in an empty file, a bug report, or minutes of silence",
    127: "a command is silent while it imports, or imports what it does not use",
    235: "a share of drops is of other samples than were read",
    236: "a rate counts tokens or seconds of other steps than its own",
    237: "FLOPs are those of padding, of whole rows, or of all images of a row as one",
    230: "the report of a plan counts epochs or pieces as samples, or drops otherwise than its budget",
    231: "`explain` describes another sample of the same key, one of several, or calls a dropped piece fine",
    232: "a reader of a pipe that went away looks like a check that failed",
    233: "a narrow terminal shows a number without its last digits",
    234: "the drops of each modality are 0 whatever is dropped",
    225: "an interval is narrower than the error of what was drawn, or a count of none is taken for nothing",
    226: "advice follows from the last rows of an epoch, or from chance",
    227: "packs are foretold without the pieces that the run makes of long samples",
    228: "samples over a limit of a row are counted as too long",
    229: "steps of ranks that sort their packs are foretold as if they did not",
}
STATS = "tests/report/test_stats.py::"
FORETOLD = STATS + "test_a_run_makes_the_packs_that_are_foretold"
STORY = "tests/report/test_sample_story.py::"
MAIN = "tests/cli/test_main.py::"

METRICS = "tests/energon/test_pack_metrics.py::"
FLOPS = "tests/conformance/test_thd_bridge.py::test_flops_of_a_row_are_those_of_its_segments_and_images"
PAGE = "tests/report/test_preview_page.py::"
IMPORTS = "tests/test_imports.py::"
FIRST = "tests/cli/test_first_hour.py::"

SEE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=63,
        name="packs that are ready ahead count as used",
        test=METRICS + "test_packs_count_when_they_are_taken_and_not_when_they_are_made",
        oracle="the packs that were taken",
        edits=(
            (
                "energon/metrics.py",
                "costs, shared.micro_batches if shared else 0))\n",
                "costs, shared.micro_batches if shared else 0))\n        self._used(0.0, self._taken + 1)\n",
            ),
        ),
    ),
    Mutation(
        trap=63,
        name="padding of samples counts as the tail of the row",
        test=METRICS + "test_a_line_sums_up_the_packs_of_its_steps_and_the_last_line_the_rest[3-1]",
        oracle="the padding mask of each row",
        edits=(
            ("energon/metrics.py", "alignment=pack.occupied - batch.real_tokens", "alignment=0"),
            (
                "energon/metrics.py",
                "tail=batch.total_tokens - pack.occupied,",
                "tail=batch.total_tokens - batch.real_tokens,",
            ),
        ),
    ),
    Mutation(
        trap=63,
        name="markup in a path ends the element of the page's title",
        test=PAGE + "test_nothing_that_a_sample_says_is_markup",
        oracle="Python's `html.parser`",
        edits=(("report/page.py", "    return html.escape(text, quote=True)\n", "    return text\n"),),
    ),
    Mutation(
        trap=126,
        name="a full disk leaves an empty page or configuration",
        test=FIRST + "test_a_full_disk_leaves_what_was_there_and_nothing_else[None]",
        oracle="the listing of the directory",
        edits=(("report/page.py", "            aside.unlink(missing_ok=True)\n", "            pass\n"),),
    ),
    Mutation(
        trap=126,
        name="a bar ends a command on a terminal that is not UTF-8",
        test=FIRST + "test_a_terminal_that_is_not_utf8_shows_escapes",
        oracle="Python's own encoder",
        edits=(
            ("cli/main.py", 'stream.reconfigure(errors="backslashreplace")', 'stream.reconfigure(errors="strict")'),
        ),
    ),
    Mutation(
        trap=126,
        name="a base install says that there is no module named torch",
        test=FIRST + "test_a_public_name_of_a_base_install_says_which_extra_it_needs",
        oracle="the extras of pyproject.toml",
        edits=(
            (
                "__init__.py",
                "        raise ModuleNotFoundError(needed, name=error.name) from error\n",
                "        raise\n",
            ),
        ),
    ),
    Mutation(
        trap=126,
        name="a hub without a network is asked for every file six times",
        test=FIRST + "test_a_hub_that_does_not_answer_is_asked_once[False]",
        oracle="the hub's own switch",
        edits=(("families/registry.py", "            constants.HF_HUB_OFFLINE = True\n", "            pass\n"),),
    ),
    Mutation(
        trap=126,
        name="JSON Lines named .txt are trained as documents",
        test=FIRST + "test_json_lines_in_a_text_file_are_not_trained_as_documents[lines]",
        oracle="the records as JSON reads them",
        edits=(("convert/sources.py", 'while first == b"{" and not line:', "while False:"),),
    ),
    Mutation(
        trap=126,
        name="a data set of captions ends in a traceback of Energon",
        test="tests/energon/test_damaged_data.py::test_a_data_set_of_other_samples_is_refused_in_a_sentence[text]",
        oracle="the class that Energon gives",
        edits=(("energon/task_encoder.py", "if not isinstance(sample, ConversationSample):", "if False:"),),
    ),
    Mutation(
        trap=126,
        name="a file that gives an I/O error is called a bug of ours",
        test=FIRST + "test_a_file_that_cannot_be_read_is_said_to_be_so",
        oracle="the kernel's error",
        edits=(
            (
                "validate/run_source.py",
                'raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error',
                "raise",
            ),
        ),
    ),
    Mutation(
        trap=127,
        name="a command says what it does when it has imported everything",
        test=IMPORTS + "test_commands_say_what_they_do_before_they_import_what_takes_long",
        oracle="`sys.modules` of a fresh interpreter",
        edits=(
            (
                "cli/measure.py",
                "    starting(f\"Measuring {', '.join(map(shown, datasets))}\", quiet=as_json or bool(edits))\n",
                '    import energon_packing.offline.measure\n\n    starting("Measuring data", quiet=as_json)\n',
            ),
        ),
    ),
    Mutation(
        trap=127,
        name="the names of executors and layouts are asked for although the default is taken",
        test=IMPORTS + "test_a_command_imports_nothing_that_it_does_not_need[convert nowhere.jsonl --dry-run --json-]",
        oracle="`sys.modules` of a fresh interpreter",
        edits=(("cli/options.py", "value if param is not None and value == param.default else super()", "super()"),),
    ),
    Mutation(
        trap=235,
        name="samples that wait in a window are missing below the share of drops",
        test=METRICS + "test_the_share_of_drops_is_that_of_the_data_from_the_first_pack_on[0]",
        oracle="every fifth conversation, which is too long",
        edits=(
            (
                "energon/metrics.py",
                "self.dropped.total(), self.read * (self.dropped.total() <= self.read)",
                "self.dropped.total(), self.samples + self.dropped.total()",
            ),
        ),
    ),
    Mutation(
        trap=236,
        name="the step that has begun counts in place of the one that ended",
        test=METRICS + "test_a_line_sums_up_the_packs_of_its_steps_and_the_last_line_the_rest[3-1]",
        oracle="the tensors of the packs before the last one",
        edits=(("energon/metrics.py", "waited, self._last[1]", "waited, work"),),
    ),
    Mutation(
        trap=236,
        name="the rates of several ranks are those of one",
        test=METRICS + "test_waiting_is_the_time_in_the_reader_but_for_the_first_pack",
        oracle="a clock that the test moves",
        edits=(
            (
                "energon/metrics.py",
                "sum(last.done[name] / last.seconds for last in timed)",
                "max(last.done[name] / last.seconds for last in timed)",
            ),
        ),
    ),
    Mutation(
        trap=237,
        name="all images of a row attend to each other",
        test=FLOPS + "[drawn2-None-segments2-images2-1478304-1.0748]",
        oracle="the shapes of all matrices, by hand",
        edits=(("bridge/metrics.py", 'rates["patch_squares"] / unit**2', "patches**2 / unit**2"),),
    ),
    Mutation(
        trap=237,
        name="the padding of a row is work",
        test=FLOPS + "[drawn1-64-segments1-images1-342960-4.303]",
        oracle="the shapes of all matrices, by hand",
        edits=(("energon/metrics.py", "        tokens=batch.real_tokens,\n", "        tokens=batch.total_tokens,\n"),),
    ),
    Mutation(
        trap=230,
        name="pieces of a split sample count as samples of their own",
        test=STATS + "test_a_plan_of_three_epochs_tells_the_samples_drops_and_steps_that_a_run_of_it_has[split]",
        oracle="the keys that a run of the plan has",
        edits=(("report/stats_samples.py", "kept = once.group_by(place)", 'kept = once.group_by([*place, "piece"])'),),
    ),
    Mutation(
        trap=230,
        name="drops of pieces count one by one, which the budget does not",
        test=STATS + "test_a_plan_of_three_epochs_tells_the_samples_drops_and_steps_that_a_run_of_it_has[split]",
        oracle="the sentence with which the planner refuses them",
        edits=(
            (
                "report/stats_samples.py",
                'Counter(each["dropped"] if often else ())',
                'Counter(drop["reason"] for drop in read_drops(plan.path, facts.id))',
            ),
        ),
    ),
    Mutation(
        trap=231,
        name="splits are searched in the order of their names",
        test=STORY + "test_all_copies_of_a_key_in_the_split_of_the_run_are_told_first_and_described[val]",
        oracle="the lengths that the loader packs",
        edits=(("report/sample_story.py", "in dict.fromkeys((own, *SPLITS)):", "in SPLITS:"),),
    ),
    Mutation(
        trap=231,
        name="a blend is searched for the first copy only",
        test=STORY + "test_all_copies_of_a_key_in_the_split_of_the_run_are_told_first_and_described[train]",
        oracle="the lengths that the loader packs",
        edits=(
            (
                "report/sample_story.py",
                "for split, part, shard, offset, size in places:",
                "for split, part, shard, offset, size in places[:1]:",
            ),
        ),
    ),
    Mutation(
        trap=231,
        name="a piece that is refused is told as if it were packed",
        test=STORY + "test_the_fate_of_each_piece_is_that_of_the_loader",
        oracle="the drops of the loader",
        edits=(
            (
                "report/sample_story.py",
                "    for piece in chosen:\n",
                "    for piece in [each for each in chosen if each.problem is None or sized.split is None]:\n",
            ),
        ),
    ),
    Mutation(
        trap=231,
        name="a stored pack is said to hold what could not be decoded",
        test="tests/offline/test_packed_loader.py::test_a_sample_that_cannot_be_decoded_is_dropped_as_from_the_plan",
        oracle="the packs of the plan's own loader",
        edits=(("report/sample_story.py", 'lost.get((each["sample"], shard))', "None"),),
    ),
    Mutation(
        trap=232,
        name="what rich prints into a closed pipe ends with the code of a failed check",
        test=MAIN + "test_a_reader_that_leaves_early_sees_no_error_and_no_failed_check[rich]",
        oracle="the exit code of a process",
        edits=(("cli/main.py", "isinstance(end.__context__, BrokenPipeError)", "False"),),
    ),
    Mutation(
        trap=233,
        name="columns share what room there is",
        test=MAIN + "test_a_table_cuts_no_digit_at_any_width[40]",
        oracle="the numbers that were given",
        edits=(("cli/terminal.py", "room <= options.max_width", "True"),),
    ),
    Mutation(
        trap=234,
        name="nobody counts the drops of a modality",
        test=STATS + "test_drops_of_each_modality_are_those_of_its_rows",
        oracle="the rows, counted by hand",
        edits=(("report/stats.py", "samples.frequent.by_modality()", 'dict.fromkeys((*MODALITIES, ""), 0)'),),
    ),
    Mutation(
        trap=225,
        name="the interval of fill leaves out which samples were drawn",
        test=STATS + "test_95_of_100_intervals_of_rows_hold_the_truth[half rows with images]",
        oracle="the whole list, packed online",
        edits=(("report/stats.py", "math.sqrt(part + 1 / len(made))", "math.sqrt(1 / len(made))"),),
    ),
    Mutation(
        trap=225,
        name="no long sample was drawn, so nothing is lost",
        test=STATS + "test_95_of_100_intervals_of_rows_hold_the_truth[giants]",
        oracle="the whole list, packed online",
        edits=(("report/stats.py", "if count else 3.0", "if count else 0.0"),),
    ),
    Mutation(
        trap=225,
        name="seven images bound their mean as seven thousand do",
        test=STATS + "test_means_of_a_handful_hold_the_truth_and_one_sample_says_nothing",
        oracle="the whole list",
        edits=(("report/stats.py", "less = 1 / max(count - 1, 1)", "less = 0"),),
    ),
    Mutation(
        trap=226,
        name="a half-empty last row counts as the fill of a run that repeats",
        test=STATS + "test_rows_hold_the_tokens_that_they_are_said_to_hold",
        oracle="tokens over the rows that a window of them makes",
        edits=(("packing/online.py", "if not held.size or (steady and held.size < window):", "if not held.size:"),),
    ),
    Mutation(
        trap=226,
        name="longer rows are advised for what streams differ by",
        test=STATS + "test_what_is_recommended_is_better_than_the_run_by_more_than_chance",
        oracle="24 streams that spread by more than they differ",
        edits=(("report/stats.py", "_is_fuller(best, rows[0])) else", "True) else"),),
    ),
    Mutation(
        trap=235,
        name="ranks that only pad are left out of what was dropped",
        test=METRICS + "test_what_a_rank_dropped_before_it_only_padded_stays_counted",
        oracle="the packs of both ranks",
        edits=(
            ("energon/metrics.py", "merged(line.total for line in present)", "merged(line.total for line in lines)"),
        ),
    ),
    Mutation(
        trap=227,
        name="packs are counted without the pieces of split samples",
        test=FORETOLD + "[split]",
        oracle="the packs of `build_loader`",
        edits=(("report/stats.py", "if over.size and kind.changes_samples(run)", "if False"),),
    ),
    Mutation(
        trap=228,
        name="samples with too many images are counted as too long",
        test=FORETOLD + "[images]",
        oracle="the ledger of the run",
        edits=(("report/stats.py", '("too_long", dealt.too_long)', '("too_long", dealt.too_long | dealt.over)'),),
    ),
    Mutation(
        trap=229,
        name="packs of steps are not sorted by cost",
        test="tests/report/test_stats.py::test_ranks_that_sort_their_packs_are_foretold_to_wait_less",
        oracle="a simulation of each rank and step in plain Python",
        edits=(
            (
                "report/stats.py",
                "part = np.sort(steps[:, start : start + window], axis=1)",
                "part = steps[:, start : start + window].copy()",
            ),
        ),
    ),
)
