"""The traps of text and media, one bug or more for each; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

MEDIA_TRAPS = {
    19: "a sample without a target is trained on every token",
    20: "the token that ends an answer is not trained",
    21: "only some of several answers are trained",
    22: "placeholders of a segment are not the patches of its media over the merge",
    23: "images of two samples can be swapped without changing either",
    24: "a processor that pads on the left, or truncates, shifts everything",
    25: "a row is longer than what was packed",
    26: "a cap on frames keeps the first ones of the clip",
    27: "timestamps do not follow the clip's frame rate",
    28: "a file that a sample names twice is used once",
    38: "a hostile record passes, or reads outside of its root",
    59: "a frame of a video is not the frame of its number",
    74: "merged structs of Arrow put the keys of other tools as nulls into calls",
    75: "a template reads the clock",
    76: "transparent images on black",
    77: "settings or control tokens inside a record are ignored",
    172: "captions and frames of clips are others than Bridge prepares, in silence",
    174: "states and stored packs of clips are refused for what they do not depend on",
    198: "an image within our limit of pixels is refused for another one",
    199: "frames of a video of a variable rate are drawn or labelled at other times than they are shown",
    206: "the times of a long film cost a conversion its memory, or time without end",
}

LABELS = "tests/encoders/test_encoder_labels.py::"
SPANS = "tests/chat/test_template_spans.py::"
MEDIA = "tests/encoders/test_encoder_media.py::"
RUNS = "tests/media/test_packet_runs.py::"
HOSTILE = "tests/convert/test_convert_bad_input.py::"

TABLES = "tests/convert/test_convert_packed_sources.py::"
CLOCK = "tests/chat/test_template_traps.py::"
PIXELS = "tests/media/test_decode_images.py::"
COLUMNS = "tests/convert/test_convert_columns.py::"
UNEVEN = "tests/families/test_uneven_videos.py::"

MEDIA_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=19,
        name="without a target every token is one",
        test=LABELS + "test_an_answer_of_media_alone_is_no_target",
        oracle="the definition",
        edits=(
            (
                "encoders/encoder.py",
                "        targets = int(np.count_nonzero(trained[1:]))\n",
                "        trained[1:] |= not trained[1:].any()\n        targets = int(np.count_nonzero(trained[1:]))\n",
            ),
        ),
    ),
    Mutation(
        trap=19,
        name="a template that shows no trained turn trains the text",
        test=SPANS + "test_a_conversation_without_a_trained_turn_is_reported",
        oracle="the definition",
        edits=(
            (
                "chat/template.py",
                "        if not any(span.weight > 0 for span in kept):\n",
                "        kept = kept if any(span.weight for span in kept) else (TrainedSpan(0, len(text)),)\n"
                "        if not kept:\n",
            ),
        ),
    ),
    Mutation(
        trap=20,
        name="marks that leave the end of turn out are taken as they are",
        test=SPANS + "test_an_end_of_turn_that_the_marks_leave_out_joins_its_span",
        oracle="the definition",
        edits=(
            (
                "chat/template.py",
                "            end = self.stops.after(text, end)\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=21,
        name="the last answer alone is trained",
        test=LABELS + "test_every_assistant_turn_is_a_target_or_only_the_last",
        oracle="the definition",
        edits=(("chat/template.py", '        if self.train_on == "last_assistant":', "        if True:"),),
    ),
    Mutation(
        trap=22,
        name="an image under a lower limit keeps the placeholders of its full size",
        test="tests/energon/test_loader.py::"
        "test_placeholders_of_every_segment_are_the_patches_of_its_media_over_the_merge[resize-qwen2_5_vl]",
        oracle="the grids of the pack's own pixels",
        edits=(
            (
                "encoders/encoder.py",
                "plans, chat = self._rendered(conversation, self._resizer.family(settings))\n",
                "plans, chat = self._rendered(conversation, self.family)\n",
            ),
        ),
    ),
    Mutation(
        trap=23,
        name="every sample gets the first one's pixels",
        test="tests/thd/test_assembly.py::test_swapping_the_images_of_two_samples_changes_those_segments_alone",
        oracle="the pack before the swap",
        edits=(
            ("thd/rows.py", "            first.append(tensor)\n", "            first.append([*first, tensor][0])\n"),
        ),
    ),
    Mutation(
        trap=24,
        name="padding that somebody else's call left on stays on",
        test="tests/encoders/test_left_padding.py::"
        "test_a_processor_that_others_use_between_two_samples_changes_no_token[qwen2_5_vl]",
        oracle="a processor that nobody else uses",
        edits=(
            (
                "encoders/tokenized.py",
                "        if self._backend.padding is not None:\n            self._backend.no_padding()\n",
                "",
            ),
        ),
    ),
    Mutation(
        trap=25,
        name="segments are packed by their real lengths",
        test="tests/energon/test_loader.py::"
        "test_no_pack_exceeds_the_row_and_every_prediction_holds_after_alignment[qwen3_vl-parallel1-4]",
        oracle="the assembled rows",
        edits=(
            (
                "packing/constraints.py",
                "units: int = -(-first // self.multiple) - (-second // self.multiple)",
                "units: int = max(1, first // self.multiple) + second // self.multiple",
            ),
        ),
    ),
    Mutation(
        trap=26,
        name="a capped clip is its first frames",
        test=MEDIA + "test_a_frame_cap_samples_the_whole_clip[qwen2_5_vl]",
        oracle="the video processor of Hugging Face",
        edits=(
            (
                "families/qwen_vl.py",
                "result = tuple(sampled_frames(self.videos, total, fps, **how))",
                "result = tuple(range(len(sampled_frames(self.videos, total, fps, **how))))",
            ),
        ),
    ),
    Mutation(
        trap=27,
        name="timestamps count at 24 frames a second",
        test=MEDIA + "test_timestamps_are_seconds_of_the_real_clip",
        oracle="the processor of Hugging Face on the clip with its metadata",
        edits=(
            (
                "families/qwen_vl.py",
                "media.frame_times else index / fps for index",
                "media.frame_times else index / 24.0 for index",
            ),
        ),
    ),
    Mutation(
        trap=199,
        name="frames of a screen recording are drawn by the average rate",
        test=UNEVEN + "test_each_frame_is_on_the_screen_at_its_time[internvl]",
        oracle="the times that PyAV reads",
        edits=(
            (
                "families/geometry.py",
                "shown = frames_at(media.time_points, wanted)",
                "shown = np.asarray(chosen)",
            ),
        ),
    ),
    Mutation(
        trap=199,
        name="frames of a clip for Wan are drawn by the average rate",
        test="tests/wan/test_text_to_video_clip.py::"
        "test_a_clip_of_a_variable_rate_shows_at_each_time_what_is_on_the_screen",
        oracle="the times that PyAV reads",
        edits=(("wan/encoder.py", "if config.fps is not None and video.time_points:", "if False:"),),
    ),
    Mutation(
        trap=206,
        name="the times of a long film are noted however long that takes",
        test=UNEVEN + "test_times_of_a_long_film_are_noted_within_the_time_that_its_file_may_take",
        oracle="the clock",
        edits=(("media/probe.py", "        work(frames, 0, 0)  # its deadline\n", ""),),
    ),
    Mutation(
        trap=206,
        name="the times of a long film are a list of Python's numbers",
        test=UNEVEN + "test_a_frame_of_a_long_film_takes_the_memory_of_a_number",
        oracle="Python's own account of its memory",
        edits=(("media/probe.py", 'array("q"), Fraction()', "[], Fraction()"),),
    ),
    Mutation(
        trap=199,
        name="time steps of a screen recording are labelled by the average rate",
        test=UNEVEN + "test_the_labels_of_a_screen_recording_are_the_times_of_its_frames",
        oracle="the times that PyAV reads",
        edits=(
            (
                "families/qwen_vl.py",
                "seconds or self._seconds(media, indices, fps)",
                "self._seconds(media, shown, fps)",
            ),
        ),
    ),
    Mutation(
        trap=199,
        name="the first video stream is the film, a cover picture too",
        test="tests/media/test_decode_videos.py::test_a_cover_picture_before_the_film_is_not_the_film",
        oracle="FFmpeg's choice of the best stream",
        edits=(("media/probe.py", "video[pictured.index(False)]", "video[0]"),),
    ),
    Mutation(
        trap=28,
        name="a file named twice is one medium",
        test="tests/convert/test_convert_records.py::test_images_and_videos_are_taken_each_from_its_own_column_in_reading_order",
        oracle="the record",
        edits=(
            (
                "convert/columns.py",
                "        self.references.append(reference)\n",
                "        self.references[:] = [*dict.fromkeys([*self.references, reference])]\n",
            ),
        ),
    ),
    Mutation(
        trap=38,
        name="placeholders without a medium pass",
        test=HOSTILE + "test_each_bad_record_is_one_short_line_and_its_neighbours_are_kept",
        oracle="the record",
        edits=(
            (
                "convert/columns.py",
                "if set(entries := self.named[kind]) == set(range(len(column))):",
                "if set(entries := self.named[kind]) >= set(range(len(column))):",
            ),
        ),
    ),
    Mutation(
        trap=38,
        name="media without a placeholder are left out",
        test=HOSTILE + "test_each_bad_record_is_one_short_line_and_its_neighbours_are_kept",
        oracle="the record",
        edits=(
            (
                "convert/columns.py",
                "if set(entries := self.named[kind]) == set(range(len(column))):",
                "if set(entries := self.named[kind]) <= set(range(len(column))):",
            ),
        ),
    ),
    Mutation(
        trap=38,
        name="paths are not held to their root",
        test=HOSTILE + "test_every_kind_of_bad_media_is_rejected_by_reason_and_the_good_sample_is_kept",
        oracle="the file system",
        edits=(("convert/media_files.py", "if not path.is_relative_to(root) and", "if path == root and"),),
    ),
    Mutation(
        trap=38,
        name="links are not followed before a path is judged",
        test=HOSTILE + "test_every_kind_of_bad_media_is_rejected_by_reason_and_the_good_sample_is_kept",
        oracle="the file system",
        edits=(
            (
                "convert/media_files.py",
                "path = Path(os.path.realpath(root / reference))",
                "path = Path(os.path.abspath(root / reference))",
            ),
        ),
    ),
    Mutation(
        trap=38,
        name="links of a store that is a file system lead out of the root",
        test="tests/convert/test_convert_remote.py::test_local_records_with_media_in_a_store_and_the_other_way_round",
        oracle="the file system",
        edits=(
            (
                "remote_files.py",
                " and not Path(real).resolve().is_relative_to(Path(inside).resolve())",
                " and not inside",
            ),
        ),
    ),
    Mutation(
        trap=38,
        name="a name with a lone surrogate passes for one that a file can have",
        test="tests/test_stored_record.py::"
        "test_a_name_that_no_store_can_hold_is_refused_in_every_kind_of_record[latents]",
        oracle="Python's UTF-8 codec",
        edits=(("stored_record.py", " or not is_unicode(name)", ""),),
    ),
    Mutation(
        trap=59,
        name="times of a damaged table number the frames",
        test=RUNS + "test_times_that_contradict_the_order_of_pictures_number_no_frame",
        oracle="PyAV, which decodes the whole clip",
        edits=(
            (
                "media/video.py",
                "return whole and times == sorted(times) and [time for time in times if time >= first] ==",
                "return True or [] ==",
            ),
        ),
    ),
    Mutation(
        trap=59,
        name="frames that an edit list hides are counted",
        test=RUNS + "test_frames_that_an_edit_list_hides_are_not_counted",
        oracle="PyAV, which decodes the whole clip",
        edits=(
            (
                "media/video.py",
                "key=times.__getitem__) if not packets[number].is_discard]",
                "key=times.__getitem__)]",
            ),
        ),
    ),
    Mutation(
        trap=40,
        name="a pickled tensor may name any function",
        test="tests/wan/test_text_to_video_convert.py::"
        "test_a_bad_row_is_refused_with_its_reason_and_the_rest_goes_on[row9-unsafe_pickle]",
        oracle="a file that unpickling would make",
        edits=(("wan/tensor_files.py", 'builders.get(f"{module}.{name}"))', "super().find_class(module, name))"),),
    ),
    Mutation(
        trap=38,
        name="checksums in a torch file are not read",
        test="tests/media/test_hostile_tensor_headers.py::"
        "test_a_changed_byte_of_a_torch_file_is_rejected_or_changes_no_value",
        oracle="the tensor before its file was changed",
        edits=(("wan/tensor_files.py", "    if damaged is not None:\n", "    if False:\n"),),
    ),
    Mutation(
        trap=74,
        name="a call has the keys of all calls of its column",
        test=TABLES + "test_a_table_of_calls_and_definitions_is_stored_as_its_json_lines_are[structs-as_parquet]",
        oracle="the same records as JSON Lines",
        edits=(("convert/tables.py", "                if part is not None:\n", "                if name:\n"),),
    ),
    Mutation(
        trap=74,
        name="JSON of datasets is stored as its text",
        test=TABLES + "test_a_table_of_calls_and_definitions_is_stored_as_its_json_lines_are[structs-as_datasets_json]",
        oracle="the same records as JSON Lines",
        edits=(("convert/tables.py", '"extension_name", "") == "arrow.json"', '"extension_name", "") == "json"'),),
    ),
    Mutation(
        trap=75,
        name="a template asks the clock of the machine",
        test=CLOCK + "test_a_template_that_asks_for_the_date_is_told_the_date_of_the_setting[own-2026-01-31]",
        oracle="apply_chat_template on that day",
        edits=(
            (
                "chat/renderer.py",
                "_no_date if date is None else datetime.fromisoformat(date).strftime",
                "lambda form: f'{datetime.now():{form}}'",
            ),
        ),
    ),
    Mutation(
        trap=75,
        name="a template that asks for the date is accepted without one",
        test=CLOCK + "test_a_template_that_asks_for_the_date_is_refused_at_the_start_unless_it_is_set[gptoss]",
        oracle="the definition",
        edits=(
            ("chat/renderer.py", "if date is None and _CLOCK.search(code):", "if not code:"),
            (
                "chat/renderer.py",
                "_no_date if date is None else datetime.fromisoformat(date)",
                "datetime.fromisoformat(date or '2000-01-01')",
            ),
        ),
    ),
    Mutation(
        trap=75,
        name="special tokens are text after somebody else's call",
        test="tests/encoders/test_left_padding.py::"
        "test_a_processor_that_others_use_between_two_samples_changes_no_token[text]",
        oracle="a processor that nobody else uses",
        edits=(("encoders/tokenized.py", "self._backend.encode_special_tokens = False", "pass"),),
    ),
    Mutation(
        trap=76,
        name="the alpha channel is dropped",
        test=PIXELS + "test_a_transparent_image_is_shown_on_white_or_as_the_transformers_loader_gives_it[rgba png]",
        oracle="Pillow's alpha_composite over white",
        edits=(("media/probe.py", "    elif on_white and image.has_transparency_data:", "    elif False:"),),
    ),
    Mutation(
        trap=76,
        name="the setting does not reach the decoder",
        test=MEDIA + "test_transparency_may_be_left_to_the_processor[png with alpha-True]",
        oracle="the Hugging Face processor on the file",
        edits=(("encoders/decoding.py", 'config.transparency == "white"', "True"),),
    ),
    Mutation(
        trap=77,
        name="an image's own size is counted as an ignored column",
        test=COLUMNS + "test_an_image_that_asks_for_a_size_of_its_own_is_refused[resized_height]",
        oracle="qwen_vl_utils",
        edits=(("convert/columns.py", "    for name in _SIZES + of_video:\n", "    for name in of_video:\n"),),
    ),
    Mutation(
        trap=77,
        name="a special token of the record closes the turn",
        test=LABELS + "test_a_special_token_in_a_text_of_the_record_is_kept_or_text_or_refused[user]",
        oracle="split_special_tokens of transformers between the template's tokens",
        edits=(("encoders/encoder.py", "        conversation = self._specials(conversation)\n", ""),),
    ),
    Mutation(
        trap=172,
        name="captions are not repaired where ftfy is installed",
        test="tests/wan/test_text_to_video_clip.py::"
        "test_embeddings_equal_those_of_diffusers_pipeline_without_its_padding[True]",
        oracle="diffusers' `WanPipeline`",
        edits=(("wan/encoder.py", "html.unescape(self._repaired(caption))", "html.unescape(caption)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=172,
        name="frames of a slow clip are repeated in silence",
        test="tests/wan/test_text_to_video_clip.py::"
        "test_the_ledger_notes_a_clip_with_repeated_frames_and_one_that_becomes_a_still",
        oracle="the definition",
        edits=(("wan/encoder.py", "        if different < count:\n", "        if different < 0:\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=172,
        name="an image is shown for a second, at the rate of the run",
        test="tests/wan/test_text_to_video_convert.py::test_an_image_is_a_clip_of_one_frame",
        oracle="diffusers' VAE on Pillow's pixels",
        edits=(("wan/encoder.py", "(1, config.fps or 1.0, *sizes[2:])", "(1, 1.0, *sizes[2:])"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=172,
        name="the size that a run names is a bound",
        test="tests/wan/test_text_to_video_clip.py::test_every_frame_has_the_size_that_a_run_names",
        oracle="the options of Bridge's `prepare_dataset_wan.py`",
        edits=(
            (
                "wan/encoder.py",
                "new_height, new_width = config.frame_size\n",
                "new_height, new_width = min(height, config.frame_size[0]), min(width, config.frame_size[1])\n",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=174,
        name="a newer setting is in every fingerprint of clips",
        test="tests/wan/test_offline_clips.py::"
        "test_states_and_stored_packs_from_before_a_setting_are_read_where_it_has_its_default",
        oracle="the same files without the setting's name",
        edits=(("wan/encoder.py", " if name not in newer}", "}"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=174,
        name="stored embeddings are refused where ftfy was installed since",
        test="tests/wan/test_offline_clips.py::"
        "test_ftfy_may_come_and_go_where_captions_are_stored_as_embeddings[False]",
        oracle="the packs without it",
        edits=(("wan/kinds/clips.py", 'free - {"encoder.dtype"} | {"ftfy"}', 'free - {"encoder.dtype"}'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=198,
        name="Pillow's own limit holds where ours is higher",
        test="tests/media/test_decode_images.py::test_of_two_limits_of_pixels_ours_holds[decode_image]",
        oracle="the definition",
        edits=(("media/probe.py", "        Image.MAX_IMAGE_PIXELS = max_pixels", "        pass"),),
    ),
)
