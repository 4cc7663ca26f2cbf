"""The traps of conversion, one bug or more for each; what a row means is told in `mutation_table`."""

from __future__ import annotations

from mutation_table import Mutation

CONVERT_TRAPS: dict[int, str] = {
    40: "a pickled member runs code, or asks for any amount of room",
    44: "an explicit empty system turn is dropped, and the template's default prompt comes back",
    46: "columns and fields that change the meaning are dropped",
}

SYSTEM = "tests/convert/test_convert_system_turns.py::"
COLUMNS = "tests/convert/test_convert_columns.py::"
LOSS = "tests/convert/test_convert_loss_fields.py::"
THINKING = "tests/convert/test_convert_thinking_fields.py::"
PLAIN = "tests/convert/test_convert_plain_records.py::"
LAYOUTS = "tests/convert/test_convert_layouts.py::"
TARS = "tests/convert/test_convert_tars.py::"
PACKED = "tests/convert/test_convert_packed_sources.py::"
ORDER = "tests/convert/test_convert_workers.py::test_keys_rejects_and_warnings_come_in_the_order_of_the_records"

CONVERT_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=44,
        name="a system turn without text is left out",
        test=SYSTEM + "test_an_empty_system_turn_keeps_the_default_prompt_of_a_template_out",
        oracle="the start of Qwen2.5's template on the record's own messages",
        edits=(
            (
                "convert/turns.py",
                "    return turns\n",
                '    return [turn for turn in turns if turn.role != "system" or _holds(turn.parts)]\n',
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
                "        parts=joined([*thinking, *parts]) if thinking else parts,\n",
                "        parts=joined([*thinking, *parts]) if _holds(parts) else (),\n",
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
                "convert/loss_fields.py",
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
                "convert/loss_fields.py",
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
        edits=(("convert/loss_fields.py", "    if weight > 0:\n", "    if weight < 0:\n"),),
    ),
    Mutation(
        trap=46,
        name="thinking in a field of its own is left out",
        test=THINKING + "test_qwen3_shows_the_thinking_that_we_store_as_it_shows_the_field",
        oracle="Qwen3's template on the record's own message",
        edits=(
            (
                "convert/turns.py",
                "        parts=joined([*thinking, *parts]) if thinking else parts,\n",
                "        parts=parts,\n",
            ),
        ),
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
        edits=(("convert/record_media.py", '"start", "end", ', ""),),
    ),
    Mutation(
        trap=38,
        name="an integer of more than 64 bits becomes a float",
        test=PLAIN + "test_long_integers_are_left_to_the_standard_library",
        oracle="Python's `json`",
        edits=(
            (
                "convert/json_values.py",
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
        edits=(("convert/plain_records.py", "if set(map(len, messages)) != {2} or ", "if "),),
    ),
    Mutation(
        trap=51,
        name="a worker's second chunk gets the place of its first",
        test=ORDER,
        oracle="the bytes that one process writes",
        edits=(("convert/worker_pool.py", "done[worker.given.popleft()] = value", "done[worker.given.pop()] = value"),),
    ),
    Mutation(
        trap=51,
        name="records of all workers are looked for in the file of the first",
        test=ORDER,
        oracle="the bytes that one process writes",
        edits=(("convert/worker.py", "            audit.spool = self._number\n", "            audit.spool = 0\n"),),
    ),
    Mutation(
        trap=40,
        name="a pickle may name functions and call them",
        test=TARS + "test_no_pickle_runs_anything",
        oracle="a function that notes that it ran",
        edits=(
            ("convert/plain_pickles.py", "if instruction.name not in _ALLOWED:", 'if instruction.name == "EXT1":'),
            (
                "convert/plain_pickles.py",
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
        edits=(("convert/plain_pickles.py", "argument > count", "argument > 1 << 40"),),
    ),
    Mutation(
        trap=46,
        name="earlier turns of an Alpaca record are left out",
        test=LAYOUTS + "test_alpaca_says_what_llama_factory_makes_of_it",
        oracle="LLaMA-Factory's rules, written down by themselves",
        edits=(
            (
                "convert/layouts/question_answer.py",
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
        edits=(("convert/kto_label.py", "1.0 if wanted else -1.0", "1.0 if wanted is not None else -1.0"),),
    ),
    Mutation(
        trap=46,
        name="thoughts of LLaMA-Factory's v1 are left out",
        test=LAYOUTS + "test_v1_parts_become_text_thinking_and_calls_with_their_weights",
        oracle="the rules of its Qwen3 renderer, written down by themselves",
        edits=(("convert/layouts/llamafactory_v1.py", "    if thoughts:\n", "    if len(thoughts) > 9:\n"),),
    ),
    Mutation(
        trap=46,
        name="a record of two layouts is read as the first of them",
        test=LAYOUTS + "test_a_record_of_two_layouts_is_refused_with_both_names",
        oracle="the record",
        edits=(("convert/layouts/registry.py", "    if len(found) > 1:\n", "    if len(found) > 8:\n"),),
    ),
    Mutation(
        trap=51,
        name="of the rows that damage makes unreadable, one is reported for each chunk",
        test=PACKED + "test_a_damaged_row_group_costs_its_own_rows_in_every_division_into_chunks",
        oracle="the numbers of all rows",
        edits=(("convert/table_files.py", "range(row, chunk.end)", "range(row, row + 1)"),),
    ),
)
