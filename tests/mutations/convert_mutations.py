"""The traps of conversion, one bug or more for each; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

CONVERT_TRAPS: dict[int, str] = {
    40: "a pickled member runs code, or asks for any amount of room",
    44: "an explicit empty system turn is dropped, and the template's default prompt comes back",
    46: "columns and fields that change the meaning are dropped",
    67: "both answers of a preference pair are trained by cross-entropy",
    108: "copies of a record are in train and val, and more data moves records between them",
    109: "what a source holds is skipped unsaid, or one file or record ends the command",
    110: "a failure of the machine is kept as bad data, or a file of kilobytes takes hours or gigabytes",
    111: "what data say steers a terminal, or reports show passwords, or --out and --resume are taken for others",
    105: "a well-known set, a table of text or a reader's record is not what its maker wrote",
    106: "an id is lost, or taken for another, because it is not ASCII; an encoder that a run names is not used",
}

KNOWN = "tests/convert/test_convert_known_files.py::"
SAME = KNOWN + "test_each_sample_equals_what_an_independent_reader_makes_of_its_record"
READ = "tests/convert/test_convert_reader.py::"
SYSTEM = "tests/convert/test_convert_records.py::"
COLUMNS = "tests/convert/test_convert_columns.py::"
LOSS = "tests/convert/test_convert_records.py::"
THINKING = "tests/convert/test_convert_records.py::"
PLAIN = "tests/convert/test_convert_plain_records.py::"
LAYOUTS = "tests/convert/test_convert_layouts.py::"
TARS = "tests/convert/test_convert_tars.py::"
PAIRS = "tests/conformance/test_trained_pairs.py::"
CHOSEN = PAIRS + "test_a_run_trains_of_pairs_and_labelled_answers_what_it_chose"
MET = PAIRS + "test_a_pair_that_nobody_counted_stops_the_run_where_it_is_met"
COUNTED = PAIRS + "test_every_layout_of_pairs_is_counted_and_refused_in_one_sentence_by_every_command"
SPLITS = "tests/convert/test_convert_splits.py::"
BORDERS = "tests/convert/test_convert_borders.py::"
PACKED = "tests/convert/test_convert_packed_sources.py::"
ATTACKS = "tests/convert/test_convert_attacks.py::"
ORDER = "tests/convert/test_convert_workers.py::test_keys_rejects_and_warnings_come_in_the_order_of_the_records"

CONVERT_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=109,
        name="a file of zstd that is cut off is read as a whole one",
        test=PACKED + "test_a_compressed_file_that_is_cut_says_so_wherever_it_is_cut[as_zstd]",
        oracle="zstandard's writer",
        edits=(
            (
                "convert/sources.py",
                "    if frame is not None:\n        raise EOFError",
                "    if not frame:\n        return",
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="a rate of null hides the one beside it",
        test=SYSTEM + "test_a_content_part_may_hold_a_list_of_frames_as_qwen_writes_it",
        oracle="the record",
        edits=(
            (
                "convert/columns.py",
                'first_of(timed, "sample_fps", "fps", _RATES)',
                'timed.get("sample_fps", timed.get("fps", rate))',
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="messages in cells are trained as the text of an answer",
        test="tests/convert/test_convert_sources.py::test_messages_of_a_pair_in_cells_are_messages_and_no_text",
        oracle="the records",
        edits=(("convert/tables.py", "or name in _SPOKEN):", "or False):"),),
    ),
    Mutation(
        trap=105,
        name="a list in a cell of a renamed column stays text",
        test=LAYOUTS + "test_a_column_of_csv_holds_the_lists_of_the_name_that_it_stands_for[messages-openai]",
        oracle="the records",
        edits=(("convert/tables.py", "_cell(read_as.get(name, name), cell)", "_cell(name, cell)"),),
    ),
    Mutation(
        trap=46,
        name="a weight in a cell of text is counted as an ignored column",
        test=COLUMNS + "test_a_column_that_changes_the_meaning_is_refused_by_name[weight-0-weighs]",
        oracle="the record",
        edits=(("convert/columns.py", "value = parse_part(value.strip().lower())", "value = None"),),
    ),
    Mutation(
        trap=109,
        name="a number in a header of a tar ends the command",
        test=TARS + "test_a_size_that_no_file_has_ends_the_tar_and_not_the_command",
        oracle="the number of samples",
        edits=(("convert/tars.py", "except (tarfile.TarError, ValueError, OverflowError)", "except tarfile.TarError"),),
    ),
    Mutation(
        trap=44,
        name="a system turn without text is left out",
        test=SYSTEM + "test_an_empty_system_turn_keeps_the_default_prompt_of_a_template_out",
        oracle="the start of Qwen2.5's template on the record's own messages",
        edits=(
            (
                "convert/turns.py",
                "    return turns\n",
                '    return [turn for turn in turns if turn.role != "system" or holds(turn.parts)]\n',
            ),
        ),
    ),
    Mutation(
        trap=44,
        name="white space of a system turn is stripped",
        test=SYSTEM + "test_an_explicit_system_turn_without_text_is_kept_to_the_letter",
        oracle="the record",
        edits=(
            (
                "convert/turns.py",
                "        parts=joined([*around, *parts]) if around else parts,\n",
                "        parts=joined([*around, *parts]) if holds(parts) else (),\n",
            ),
        ),
    ),
    Mutation(
        trap=46,
        name="answers that are labelled bad become targets",
        test=COLUMNS + "test_half_good_and_half_bad_answers_as_llama_factory_labels_them_give_no_target",
        oracle="the record",
        edits=(("convert/columns.py", 'LABELS = ("label", "labels",', "LABELS = ("),),
    ),
    Mutation(
        trap=46,
        name="sound is left out, its placeholder is text",
        test=COLUMNS + "test_sound_that_the_answer_is_about_is_refused",
        oracle="the record",
        edits=(("convert/columns.py", 'AUDIO = ("audio", "audios",', 'AUDIO = ("audio",'),),
    ),
    Mutation(
        trap=46,
        name="ms-swift's `loss` of a message is not read",
        test=LOSS + "test_the_answers_that_train_are_those_that_their_fields_say",
        oracle="the record",
        edits=(
            (
                "convert/fields.py",
                'LOSS_FIELDS = ("weight", "loss", "loss_weight", "train")',
                'LOSS_FIELDS = ("weight", "loss_weight", "train")',
            ),
        ),
    ),
    Mutation(
        trap=46,
        name="the first of two weights that contradict each other wins",
        test=LOSS + "test_fields_that_contradict_each_other_are_refused_with_both_names",
        oracle="the record",
        edits=(
            (
                "convert/fields.py",
                "    if len(numbers) > 1 or len(trained) > 1:\n",
                "    if not given:\n",
            ),
        ),
    ),
    Mutation(
        trap=46,
        name="a question that asks to be trained is not, and nobody says so",
        test=LOSS + "test_a_question_that_asks_to_be_trained_is_refused_and_one_that_asks_not_to_be_is_not",
        oracle="the record",
        edits=(("convert/fields.py", "    if weight > 0:\n", "    if weight < 0:\n"),),
    ),
    Mutation(
        trap=46,
        name="thinking in a field of its own is left out",
        test=THINKING + "test_qwen3_shows_the_thinking_that_we_store_as_it_shows_the_field",
        oracle="Qwen3's template on the record's own message",
        edits=(("convert/turns.py", "        thinking=thought,\n", "        thinking=None,\n"),),
    ),
    Mutation(
        trap=46,
        name="columns that nothing reads are not counted",
        test=COLUMNS + "test_every_filled_column_is_read_refused_or_named",
        oracle="the record",
        edits=(("convert/columns.py", "    return unread(record, read)\n", "    return set()\n"),),
    ),
    Mutation(
        trap=46,
        name="fields of a message that nothing reads are not counted",
        test=COLUMNS + "test_every_filled_field_is_read_refused_or_named",
        oracle="the record",
        edits=(("convert/turns.py", '    media.ignore(message, read, f"{column}[]")\n', ""),),
    ),
    Mutation(
        trap=46,
        name="the part of a video that a record asks for becomes the whole",
        test=COLUMNS + "test_a_part_of_a_video_is_refused_where_the_whole_would_be_shown",
        oracle="the record",
        edits=(("convert/columns.py", '"start", "end", ', ""),),
    ),
    Mutation(
        trap=38,
        name="an integer of more than 64 bits becomes a float",
        test=PLAIN + "test_long_integers_are_left_to_the_standard_library",
        oracle="Python's `json`",
        edits=(
            (
                "convert/json_text.py",
                "    return None if _DIGITS_OF_64_BITS in text.translate(_DIGITS_TO_ZERO) else value\n",
                "    return value\n",
            ),
        ),
    ),
    Mutation(
        trap=46,
        name="a record is taken for plain text although its messages have more fields",
        test=PLAIN + "test_records_that_lead_to_a_warning_or_a_rejection_take_the_general_road",
        oracle="the general road of a record",
        edits=(("convert/records.py", "if set(map(len, messages)) != {2} or ", "if "),),
    ),
    Mutation(
        trap=51,
        name="a worker's second chunk gets the place of its first",
        test=ORDER,
        oracle="the bytes that one process writes",
        edits=(("executors/work.py", "given.append(task)", "given.appendleft(task)"),),
    ),
    Mutation(
        trap=51,
        name="records of all workers are looked for in the file of the first",
        test=ORDER,
        oracle="the bytes that one process writes",
        edits=(("convert/pipeline.py", "ChunkAudit(spool=self._number", "ChunkAudit(spool=0"),),
    ),
    Mutation(
        trap=40,
        name="a pickle may name functions and call them",
        test=TARS + "test_no_pickle_runs_anything",
        oracle="a function that notes that it ran",
        edits=(
            ("convert/tars.py", "if instruction.name not in OF_LISTS:", 'if instruction.name == "EXT1":'),
            (
                "convert/tars.py",
                'raise pickle.UnpicklingError(f"it names {module}.{name}")',
                "return super().find_class(module, name)",
            ),
        ),
    ),
    Mutation(
        trap=40,
        name="a pickle of ten bytes may ask for gigabytes",
        test=TARS + "test_a_pickle_that_asks_for_room_it_does_not_need_is_refused_before_it_gets_any",
        oracle="the instructions that `pickletools` shows",
        edits=(("convert/tars.py", "argument > count", "argument > 1 << 40"),),
    ),
    Mutation(
        trap=46,
        name="earlier turns of an Alpaca record are left out",
        test=LAYOUTS + "test_alpaca_says_what_llama_factory_makes_of_it",
        oracle="LLaMA-Factory's rules, written down by themselves",
        edits=(
            (
                "convert/layouts/instructions.py",
                'messages = [*_history(record), {"role": "user", "content": question}]',
                'messages = [{"role": "user", "content": question}]',
            ),
        ),
    ),
    Mutation(
        trap=46,
        name="an unwanted answer gets the sign of a wanted one",
        test=LAYOUTS + "test_a_named_label_becomes_the_preference_that_pairs_have",
        oracle="the answers of a pair",
        edits=(("convert/columns.py", "1.0 if wanted else -1.0", "1.0 if wanted is not None else -1.0"),),
    ),
    Mutation(
        trap=46,
        name="thoughts of LLaMA-Factory's v1 are left out",
        test=LAYOUTS + "test_v1_parts_become_text_thinking_and_calls_with_their_weights",
        oracle="the rules of its Qwen3 renderer, written down by themselves",
        edits=(("convert/layouts/conversations.py", "    if thoughts:\n", "    if len(thoughts) > 9:\n"),),
    ),
    Mutation(
        trap=46,
        name="a record of two layouts is read as the first of them",
        test=LAYOUTS + "test_a_record_of_two_layouts_is_refused_with_both_names",
        oracle="the record",
        edits=(("convert/layouts/layout.py", "layout.matches(record)]) > 1:\n", "layout.matches(record)]) > 8:\n"),),
    ),
    Mutation(
        trap=46,
        name="of two columns of turns that differ, the first is trained",
        test=LAYOUTS + "test_two_columns_of_turns_are_refused_where_they_differ",
        oracle="the record of each column alone",
        edits=(("convert/records.py", "in fitting] if len(fitting) > 1 else", "in fitting] if len(fitting) > 8 else"),),
    ),
    Mutation(
        trap=51,
        name="of the rows that damage makes unreadable, one is reported for each chunk",
        test=PACKED + "test_a_damaged_row_group_costs_its_own_rows_in_every_division_into_chunks",
        oracle="the numbers of all rows",
        edits=(("convert/tables.py", "range(row, chunk.end)", "range(row, row + 1)"),),
    ),
    Mutation(
        trap=46,
        name="a loss of a whole record is an ignored column",
        test=COLUMNS + "test_a_column_that_changes_the_meaning_is_refused_by_name[loss-False-weighs]",
        oracle="the record",
        edits=(("convert/columns.py", '*("loss", "train_mask"', '*("train_mask"'),),
    ),
    Mutation(
        trap=67,
        name="who chose nothing trains both answers",
        test=MET + "[plain Energon]",
        oracle="the record",
        edits=(
            (
                "conversation.py",
                "        if self.is_pair or self.is_unwanted:\n",
                "        if self.is_pair and self.is_unwanted:\n",
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="packs of Bridge, Megatron-LM and plain Energon ignore the choice",
        test=CHOSEN + "[LLaMA-Factory dpo-plain Energon]",
        oracle="the chosen answers of the records, decoded by Hugging Face's tokenizer",
        edits=(
            (
                "energon/task_encoder.py",
                "sample.conversation.trained(self.packing.pairs)",
                "sample.conversation",
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="rows of single samples ignore the choice",
        test=CHOSEN + "[LLaMA-Factory kto-plain Energon, single rows]",
        oracle="the wanted answers of the records, decoded by Hugging Face's tokenizer",
        edits=(
            (
                "energon/sample_task_encoder.py",
                "            **packing,\n",
                '            **packing | {"pairs": "both"},\n',
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="measuring ignores the choice",
        test=CHOSEN + "[LLaMA-Factory dpo-from a plan]",
        oracle="the chosen answers of the records, decoded by Hugging Face's tokenizer",
        edits=(("kinds/conversations.py", "pairs=run.packing.pairs", 'pairs="both"'),),
    ),
    Mutation(
        trap=67,
        name="an index of one choice is planned and measured on under another",
        test=COUNTED + "[ms-swift rejected_response]",
        oracle="the configuration that measured it",
        edits=(
            (
                "offline/measure.py",
                'marked_and_set(run.packing, "newer", "lengths").items()',
                'marked_and_set(run.packing, "by_family").items()',
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="a loader opens data with pairs that convert counted",
        test=CHOSEN + "[LLaMA-Factory dpo-Bridge, packs]",
        oracle="the count of the records",
        edits=(
            (
                "energon/loader.py",
                ".check(config.data.path, config.packing.pairs)",
                '.check(config.data.path, "both")',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=67,
        name="the refusal of a pair is one dropped sample",
        test=MET + "[Megatron-LM]",
        oracle="the record",
        edits=(
            (
                "energon/samples.py",
                'return cls(reason="config", detail=str(error), fatal=error)',
                'return cls(reason="config", detail=str(error))',
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="pairs that the run asked to drop use up its drop budget",
        test="tests/energon/test_task_encoders.py::"
        "test_a_pair_is_left_out_by_choice_or_stops_the_run_where_a_sample_is_one_row",
        oracle="the record",
        edits=(
            (
                "ledger.py",
                "counted, read = unwished(self.reasons, self.read)",
                "counted, read = self.reasons, self.read",
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="with the chosen answer, earlier answers are trained that nobody chose",
        test="tests/encoders/test_preference_and_extras.py::"
        "test_a_chosen_answer_is_trained_as_in_the_pair_and_earlier_answers_are_not",
        oracle="the chosen half of the measured pair",
        edits=(
            (
                "conversation.py",
                "return replace(self.answers()[0], key=self.key) if self.is_pair else self",
                "return replace(self.answers()[0], key=self.key, turns=(*self.turns, *self.chosen)) "
                "if self.is_pair else self",
            ),
        ),
    ),
    Mutation(
        trap=67,
        name="convert does not count pairs",
        test=COUNTED + "[TRL implicit prompt]",
        oracle="the records",
        edits=(("convert/pipeline.py", 'pairs=mentions["pair"]', "pairs=0"),),
    ),
    Mutation(
        trap=67,
        name="unwanted answers of LLaMA-Factory come in without a choice",
        test=PAIRS + "test_labelled_answers_of_llama_factory_come_in_only_where_the_user_says_so",
        oracle="the entry of dataset_info.json",
        edits=(
            (
                "cli/convert.py",
                'if given["kto_label"] != (label',
                'if given["kto_label"] and given["kto_label"] != (label',
            ),
        ),
    ),
    Mutation(
        trap=108,
        name="the split follows the key",
        test=SPLITS + "test_copies_share_a_split_and_more_data_moves_none[polylithic]",
        oracle="the samples in the tars",
        edits=(
            (
                "convert/pipeline.py",
                "positions_of(audit.contents)",
                'positions_of([int.from_bytes(key_digest(key)[:4], "big") for key in keys])',
            ),
        ),
    ),
    Mutation(
        trap=108,
        name="a file that is named twice is read twice",
        test=BORDERS + "test_a_file_that_is_named_twice_by_whatever_path_or_pattern_is_read_once_and_said",
        oracle="the records",
        edits=(("convert/chunks.py", "os.path.realpath(path)) in places:\n", "os.path.realpath(path)) in ():\n"),),
    ),
    Mutation(
        trap=109,
        name="links out of a directory are skipped in silence",
        test=BORDERS + "test_links_are_followed_inside_the_named_directory_and_all_others_are_named",
        oracle="the directory",
        edits=(("convert/chunks.py", "        left.append(str(path))\n        return True", "        return True"),),
    ),
    Mutation(
        trap=109,
        name="a snapshot of links is skipped",
        test=BORDERS + "test_a_snapshot_of_links_is_read_whole_with_its_images",
        oracle="the records",
        edits=(("convert/chunks.py", 'if path.name == "snapshots"), None)', 'if path.name == "snapshot"), None)'),),
    ),
    Mutation(
        trap=109,
        name="frames after the first are left out in silence",
        test=BORDERS + "test_images_of_several_frames_are_counted[full]",
        oracle="Pillow's writer",
        edits=(("media/probe.py", 'animated = image.format != "MPO" and', 'animated = image.format == "MPO" and'),),
    ),
    Mutation(
        trap=109,
        name="a sample of a tar is cut in two",
        test=BORDERS + "test_a_sample_with_too_many_members_is_one_reject",
        oracle="tarfile",
        edits=(
            (
                "convert/tars.py",
                "            if members and name != key:\n",
                "            if members and (name != key or len(members) >= _MOST_MEMBERS):\n",
            ),
        ),
    ),
    Mutation(
        trap=109,
        name="a second ending of the same bytes is not stored",
        test=BORDERS + "test_two_endings_of_the_same_bytes_are_two_names_of_one_content[polylithic]",
        oracle="Energon's loader",
        edits=(("convert/shards.py", "self._named.setdefault(digest, []).append(StoredFile.of(file, stamp))", "pass"),),
    ),
    Mutation(
        trap=109,
        name="a file name that is not UTF-8 ends the conversion",
        test=BORDERS + "test_names_that_are_not_utf_8_cost_nothing",
        oracle="the records",
        edits=(("convert/shards.py", "os.fsencode(file.path), *stamp", "file.path, *stamp"),),
    ),
    Mutation(
        trap=109,
        name="a foreign line ends the report of a ledger",
        test=BORDERS + 'test_a_line_of_a_ledger_of_a_foreign_type_is_counted_and_left_out[{"pack": 1, "keys": 5}]',
        oracle="the lines",
        edits=(("ledger.py", "if not typed or (entry", "if not entry or (entry"),),
    ),
    Mutation(
        trap=109,
        name="offsets of an Arrow file are believed",
        test=BORDERS
        + "test_an_arrow_file_with_any_offset_elsewhere_is_rejected_or_read_and_never_ends_the_process[False]",
        oracle="the exit of the process",
        edits=(("convert/tables.py", "self._batch.validate(full=True)", "self._batch.validate()"),),
    ),
    Mutation(
        trap=110,
        name="no memory is a bad picture",
        test=ATTACKS + "test_what_the_machine_fails_at_is_tried_again_and_is_no_bad_data",
        oracle="the picture",
        edits=(
            (
                "media/probe.py",
                "        if isinstance(error, SampleRejected) or is_machines(error):\n",
                "        if isinstance(error, SampleRejected):\n",
            ),
        ),
    ),
    Mutation(
        trap=110,
        name="a missing PyAV makes each video a damaged one",
        test="tests/cli/test_first_hour.py::"
        "test_a_video_without_pyav_is_a_sentence_with_the_extra_and_no_damaged_file[0]",
        oracle="the definition",
        edits=(("media/probe.py", "    av = pyav()\n    try:", "    import av\n\n    try:"),),
    ),
    Mutation(
        trap=110,
        name="the frames of an animation are not counted before they are decoded",
        test=ATTACKS + "test_what_was_made_to_harm_costs_one_record_and_its_sentence_says_why[animation]",
        oracle="the file's own bytes",
        edits=(
            (
                "media/probe.py",
                "            work(packets, *size)",
                "            pass",
            ),
        ),
    ),
    Mutation(
        trap=110,
        name="a dictionary of Parquet is repeated for a thousand rows at once",
        test=ATTACKS + "test_a_table_of_kilobytes_takes_no_gigabytes[dictionary-256]",
        oracle="Arrow's own count of its memory",
        edits=(
            (
                "convert/tables.py",
                "                repeated += of_row * _largest_entry(data[at : at + stored], size, count, column)\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=110,
        name="a file that cannot be read while shards are written is said to have changed",
        test="tests/convert/test_convert_workers.py::test_a_file_that_cannot_be_read_for_a_moment_has_not_changed[9]",
        oracle="the file",
        edits=(("convert/shards.py", 'if fault_of(error) == "file":', "if error:"),),
    ),
    Mutation(
        trap=111,
        name="sources in another order have the same identifier",
        test="tests/convert/test_convert_index.py::test_the_same_sources_in_another_order_are_another_data_set",
        oracle="the data sets",
        edits=(("convert/pipeline.py", '("" if told else json.dumps(sources))', '""'),),
    ),
    Mutation(
        trap=110,
        name="a source without a usable record costs the media checks of all others",
        test="tests/convert/test_convert_workspace.py::"
        "test_a_source_without_a_usable_record_does_not_cost_the_media_checks_of_others",
        oracle="the files that are opened",
        edits=(("convert/pipeline.py", "if config.dry_run or not media.files:", "if config:"),),
    ),
    Mutation(
        trap=110,
        name="what took too long stays rejected",
        test=ATTACKS + "test_resume_tries_again_what_another_time_or_machine_may_not_refuse",
        oracle="the animation",
        edits=(
            (
                "convert/media_files.py",
                '("missing_media", "decode_timeout")',
                '("missing_media",)',
            ),
        ),
    ),
    Mutation(
        trap=111,
        name="keys of a ledger reach the terminal as they are",
        test=ATTACKS + "test_nothing_in_the_data_steers_the_terminal",
        oracle="the escape",
        edits=(
            (
                "cli/ledger.py",
                'visible(f"  twice: {key}")',
                'f"  twice: {key}"',
            ),
        ),
    ),
    Mutation(
        trap=111,
        name="rejects show the signature of an address",
        test=ATTACKS + "test_what_was_made_to_harm_costs_one_record_and_its_sentence_says_why[signed]",
        oracle="the address",
        edits=(
            (
                "remote_files.py",
                '_QUERY.sub(r"\\1?...", _USER.sub("://...@", text[:2000]))',
                '_USER.sub("://...@", text[:2000])',
            ),
        ),
    ),
    Mutation(
        trap=111,
        name="a link in the place of the data set is replaced",
        test=ATTACKS + "test_a_data_set_goes_where_a_link_leads",
        oracle="the file system",
        edits=(
            (
                "convert/pipeline.py",
                "        config = replace(config, out=config.out.resolve())\n",
                "        pass\n",
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="images of the_cauldron are left out",
        test=SAME + "[the_cauldron]",
        oracle="nanoVLM's rules, restated",
        edits=(
            (
                "convert/layouts/captions.py",
                '    if not any("<image>" in str(message["content"]) for message in messages):\n',
                "    if False:\n",
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="the index of an image part is overlooked",
        test=SAME + "[HuggingFaceH4's-vsft]",
        oracle="TRL's rules, restated",
        edits=(
            (
                "convert/columns.py",
                "at = len(self.named[kind]) if index is None else index",
                "at = len(self.named[kind])",
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="a caption of the first keyframe stands for the video",
        test=SAME + "[ShareGPT4Video]",
        oracle="the set's card",
        edits=(("convert/layouts/captions.py", 'if each["idx"] in _WHOLE]', "][:1]"),),
    ),
    Mutation(
        trap=105,
        name="only the first sample of a pack of Qwen's finetuning is read",
        test=SAME + "[Qwen's-packed-lists]",
        oracle="its code, restated",
        edits=(
            (
                "convert/records.py",
                "for at, each in enumerate(raw.value))",
                "for at, each in enumerate(raw.value[:1]))",
            ),
        ),
    ),
    Mutation(
        trap=105,
        name="a cell with a stray quote loses it",
        test="tests/convert/test_convert_sources.py::test_damaged_rows_are_refused_and_the_others_read",
        oracle="the file",
        edits=(("convert/tables.py", "[0]], strict=True)", "[0]])"),),
    ),
    Mutation(
        trap=105,
        name="escapes of a file address are kept",
        test=READ + "test_file_addresses_below_the_media_root_are_paths",
        oracle="urllib",
        edits=(("convert/media_files.py", "else unquote(path_of)", "else path_of"),),
    ),
    Mutation(
        trap=105,
        name="another generator continues a conversion",
        test=READ + "test_conversations_of_a_reader_are_stored_as_they_are_and_resumed_by_its_code",
        oracle="the reader's file",
        edits=(
            (
                "convert/config.py",
                '{"reader": name, "reader_code": hashlib.sha256(code).hexdigest()[:16]}',
                '{"reader": name}',
            ),
        ),
    ),
    Mutation(
        trap=106,
        name="ids of one script get one key",
        test=READ + "test_ids_that_are_not_ascii_become_unlike_readable_keys_and_stay_in_the_samples",
        oracle="the records' ids",
        edits=(("convert/keys.py", "    key = key_of_id(str(name))\n", "    key = safe_key(str(name))\n"),),
    ),
    Mutation(
        trap=106,
        name="a sample forgets its id",
        test=READ + "test_ids_that_are_not_ascii_become_unlike_readable_keys_and_stay_in_the_samples",
        oracle="the records' ids",
        edits=(("convert/records.py", '"extras", "source_id")\n', '"extras")\n'),),
    ),
    Mutation(
        trap=106,
        name="an encoder by name is left out",
        test="tests/conformance/test_in_batch_mode.py::test_an_encoder_of_the_users_own_makes_the_rows_of_a_data_set_that_names_it[packs]",
        oracle="the bytes of the records",
        edits=(("bridge/dataset.py", "            own or config.encoder,\n", "            config.encoder,\n"),),
        needs_bridge=True,
    ),
)
