"""The traps of Gemma 3, Pixtral, GLM-4.1V and Ernie 4.5 VL; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

GEMMA = "tests/families/test_gemma3_against_processor.py::"
PIXTRAL = "tests/families/test_pixtral_against_processor.py::"
GLM = "tests/families/test_glm4v_against_processor.py::"
GLM_MIXED = "tests/families/test_glm4v_mixed_packs.py::"
ERNIE = "tests/families/test_ernie4_5_vl_against_processor.py::"
TIMES = "tests/families/test_times_from_files.py::"
SETTINGS = "tests/families/test_processor_settings.py::"
CELL = SETTINGS + "test_frames_and_tokens_of_clips_are_the_processors_or_the_settings_are_refused_at_start"
FROM_FILES = TIMES + "test_a_file_has_the_frames_times_and_positions_that_processor_and_model_give_it"
ALL = "tests/families/test_families.py::"
WHOLE = ALL + "test_tokens_types_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample"
WHOLE_GLM = WHOLE + "[glm4v]"

FAMILY_TRAPS = {
    51: "a setting that changes packs is not in the fingerprint of the state, or the data set depends on its workers",
    83: "a frame rate computed in floats is not the container's",
    84: "float64 on one side, float32 on the other, then int()",
    148: "a pack has more patches than its vision encoder's mask over all of them has room for",
    197: "a setting or an answer is accepted and then not followed: other frames, sizes that nobody planned, no words",
    200: "images of a pack travel as if each was as large as the largest",
}

FAMILY_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=197,
        name="a processor that does not resize is accepted",
        test=SETTINGS + "test_a_processor_that_does_not_resize_is_refused_at_start",
        oracle="Hugging Face's processor",
        edits=(("families/base.py", "if self.processor_classes else ():", "if False else ():"),),
    ),
    Mutation(
        trap=197,
        name="a rate of the configuration does nothing where the processor has a number of frames",
        test=CELL + "[qwen2_vl-num_frames 16-video_fps 4.0]",
        oracle="Hugging Face's processor",
        edits=(("families/qwen_vl.py", "if config.video_fps is not None and getattr", "if not getattr"),),
    ),
    Mutation(
        trap=197,
        name="a clip with fewer frames than the processor's number is dropped",
        test=CELL + "[qwen2_vl-num_frames 16-none]",
        oracle="Hugging Face's processor",
        edits=(("families/qwen_vl.py", "self.config.video_max_frames or number, total)", "number)"),),
    ),
    Mutation(
        trap=197,
        name="a rate of null in the processor's file is taken for 2 frames per second",
        test=CELL + "[qwen3_vl-num_frames 16, fps None-none]",
        oracle="Hugging Face's processor",
        edits=(("families/qwen_vl.py", "is not None and videos.fps is None:", "is not None and False:"),),
    ),
    Mutation(
        trap=197,
        name="a rate of InternVL has a hidden cap",
        test=CELL + "[internvl-none-video_fps 4.0]",
        oracle="Hugging Face's processor",
        edits=(("families/internvl.py", "(None if self.video_fps else DEFAULT_VIDEO_FRAMES)", "DEFAULT_VIDEO_FRAMES"),),
    ),
    Mutation(
        trap=197,
        name="a rate of LLaVA-OneVision's processor is ignored",
        test=CELL + "[llava_onevision-fps 3.0-none]",
        oracle="Hugging Face's processor",
        edits=(("families/llava.py", '"fps", None) is not None and', '"fps", None) is False and'),),
    ),
    Mutation(
        trap=197,
        name="tokens of a video are merged as those of images",
        test=CELL + "[qwen2_vl-merge_size 1-none]",
        oracle="Hugging Face's processor",
        edits=(("families/qwen_vl.py", "if image != video:", "if False:"),),
    ),
    Mutation(
        trap=197,
        name="a clip is sampled although the processor takes all of its frames",
        test=CELL + "[qwen3_vl-do_sample_frames False-none]",
        oracle="Hugging Face's processor",
        edits=(
            ("families/qwen_vl.py", 'if getattr(type(videos), "do_sample_frames", False) and not', "if False and not"),
        ),
    ),
    Mutation(
        trap=2,
        name="time steps of a GLM video are counted as images",
        test=WHOLE_GLM,
        oracle="Hugging Face's model",
        edits=(("families/glm4v.py", "np.where(inside, VIDEO, IMAGE)", "IMAGE"),),
    ),
    Mutation(
        trap=2,
        name="a pack gives a dummy image the token types of text",
        test=GLM + "test_a_pack_of_text_alone_has_types_too_and_a_dummy_image_its_own",
        oracle="the definition",
        edits=(
            (
                "energon/task_encoder.py",
                "padded = [aligned_filler(row, ",
                "fillers = [{k: row[k] for k in row if k != 'mm_token_type_ids'} for row in fillers]\n"
                "        padded = [aligned_filler(row, ",
            ),
        ),
    ),
    Mutation(
        trap=22,
        name="the crops of pan-and-scan cost no token",
        test=GEMMA + "test_an_image_of_any_size_becomes_the_crops_that_the_image_processor_makes",
        oracle="Hugging Face's processor",
        edits=(
            (
                "families/gemma3.py",
                "runs=(self.square_tokens,) * tiles",
                "runs=(self.square_tokens,)",
            ),
        ),
    ),
    Mutation(
        trap=22,
        name="a token of a Pixtral image is taken for a pixel larger",
        test=ALL + "test_an_image_of_any_size_costs_what_the_processor_counts_and_makes[pixtral]",
        oracle="Hugging Face's processor",
        edits=(
            (
                "families/pixtral.py",
                "patch_size=(self.side, self.side),",
                "patch_size=(self.side + 1, self.side + 1),",
            ),
        ),
    ),
    Mutation(
        trap=23,
        name="images of a pack are padded above and to the left",
        test=PIXTRAL + "test_the_model_gives_samples_joined_in_a_pack_the_features_that_each_has_alone",
        oracle="Hugging Face's model",
        edits=(
            (
                "thd/pixels.py",
                "out=place[:, : image.shape[1], : image.shape[2]]",
                "out=place[:, -image.shape[1] :, -image.shape[2] :]",
            ),
        ),
    ),
    Mutation(
        trap=200,
        name="bytes of Pixtral images that were stored with padding are padded to the largest of the pack",
        test=PIXTRAL + "test_a_large_image_of_a_pack_makes_the_bytes_of_the_small_ones_no_more",
        oracle="the definition",
        edits=(
            (
                "encoders/joinable_rows.py",
                "if form is not None and form.sizes is not None and visual[name].dim() > 1:",
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=200,
        name="bytes of a sample's images are padded to the largest of the sample",
        test=PIXTRAL + "test_a_large_image_of_a_pack_makes_the_bytes_of_the_small_ones_no_more",
        oracle="the definition",
        edits=(
            (
                "families/pixtral.py",
                "if raw:  # each for itself: one call pads all to the largest",
                "if False:",
            ),
        ),
    ),
    Mutation(
        trap=200,
        name="a finished row counts the bytes of its images, not its images",
        test=PIXTRAL + "test_a_large_image_of_a_pack_makes_the_bytes_of_the_small_ones_no_more",
        oracle="the definition",
        edits=(
            (
                "thd/batch.py",
                "for name, form in self.pixel_forms.items() if form.sizes in counts}",
                "for name, form in {}.items()}",
            ),
        ),
    ),
    Mutation(
        trap=26,
        name="a cap on the frames of a GLM video keeps the first ones",
        test=GLM + "test_video_max_frames_takes_whole_time_steps_evenly_over_the_clip",
        oracle="the definition",
        edits=(("families/glm4v.py", "indices[round(at * (len(indices) - 1) / (most - 1))]", "indices[at]"),),
    ),
    Mutation(
        trap=27,
        name="a time step of a GLM video is told by its last frame",
        test=GLM + "test_a_frame_list_of_one_image_is_refused_by_name_and_an_odd_one_is_filled",
        oracle="the times of the list",
        edits=(("families/glm4v.py", "return seconds[::2]", "return seconds[1::2]"),),
    ),
    Mutation(
        trap=2,
        name="the tokens around an Ernie image go to the experts for text",
        test=WHOLE + "[ernie4_5_vl]",
        oracle="Hugging Face's processor",
        edits=(("families/ernie4_5_vl.py", "experts[np.isin(input_ids, ids)] = kind", "experts += 0 * kind"),),
    ),
    Mutation(
        trap=27,
        name="the time drawn on an Ernie frame is its number",
        test=ERNIE + "test_a_video_becomes_the_frames_the_grid_and_the_pixels_that_the_whole_processor_makes",
        oracle="Hugging Face's processor",
        edits=(
            (
                "families/ernie4_5_vl.py",
                "frames_indices=shown",
                "frames_indices=list(range(len(shown)))",
            ),
        ),
    ),
    Mutation(
        trap=22,
        name="a pack of images and videos goes to GLM's model as the processor names them",
        test=GLM_MIXED + "test_the_model_refuses_a_row_that_holds_images_and_videos_and_takes_ours",
        oracle="Hugging Face's model",
        edits=(("encoders/joinable_rows.py", "rows = videos_as_images(filled)", "rows = filled"),),
    ),
    Mutation(
        trap=23,
        name="GLM's videos come before the images of their sample",
        test=GLM_MIXED + "test_every_token_of_a_pack_gets_the_feature_and_the_position_that_it_has_in_its_sample_alone",
        oracle="Hugging Face's model",
        edits=(
            (
                "encoders/joinable_rows.py",
                "torch.unique_consecutive(row[TYPES]).tolist()",
                "sorted(torch.unique_consecutive(row[TYPES]).tolist(), reverse=True)",
            ),
        ),
    ),
    Mutation(
        trap=51,
        name="pan-and-scan is not part of the state",
        test=GEMMA + "test_pan_and_scan_is_part_of_the_fingerprint",
        oracle="the definition",
        edits=(("families/base.py", '"do_pan_and_scan": "tiles", ', ""),),
    ),
    Mutation(
        trap=51,
        name="clips are cut off at another length unseen",
        test=ALL + "test_a_setting_of_the_processor_that_changes_what_is_planned_changes_the_fingerprint[glm4v]",
        oracle="the plans of the family, which follow the processor",
        edits=(("families/base.py", ', "max_duration": "300"', ""),),
    ),
    Mutation(
        trap=83,
        name="the rate of a clip is its frames over their rounded times",
        test=FROM_FILES + "[qwen3_vl-setting10]",
        oracle="transformers' reader of files, and Hugging Face's processor",
        edits=(("media/probe.py", "if stated and abs((span + length) * stated - count.frames) <= 1:", "if False:"),),
    ),
    Mutation(
        trap=83,
        name="GLM's clip has the length that floats give it",
        test=FROM_FILES + "[glm4v-setting20]",
        oracle="transformers' reader of files, and Hugging Face's processor",
        edits=(("families/glm4v.py", "duration=float(total / fps)", "duration=float(total / fps) - 1e-15"),),
    ),
    Mutation(
        trap=83,
        name="records of older conversions keep their noise",
        test=TIMES + "test_a_record_of_an_older_conversion_has_the_rate_of_the_container_too",
        oracle="the rate of the container",
        edits=(
            ("conversation.py", "return near if abs(near - exact) <= exact * _OLD_NOISE else exact", "return exact"),
        ),
    ),
    Mutation(
        trap=84,
        name="seconds of a time step are truncated as float64",
        test=TIMES + "test_whole_seconds_between_time_steps_are_not_truncated_to_fewer",
        oracle="`get_rope_index` of Hugging Face",
        edits=(
            (
                "families/qwen_vl.py",
                "seconds = np.float32(plan.seconds_per_grid or 0)",
                "seconds = plan.seconds_per_grid",
            ),
        ),
    ),
    Mutation(
        trap=84,
        name="positions of a clip are those of another release's model",
        test=TIMES + "test_positions_of_a_clip_are_truncated_where_the_installed_model_truncates_them[positions]",
        oracle="`get_rope_index` of Hugging Face",
        edits=(("families/qwen_vl.py", "if truncates_seconds() else", "if True else"),),
    ),
    Mutation(
        trap=51,
        name="rows of another release of transformers have the same fingerprint",
        test=TIMES + "test_positions_of_a_clip_are_truncated_where_the_installed_model_truncates_them[positions]",
        oracle="`get_rope_index` of Hugging Face",
        edits=(("encoders/encoder.py", 'value + self.family.installed.get(name, "")', "value"),),
    ),
    Mutation(
        trap=84,
        name="clips have the sizes of a processor that does not cap the pixels of each frame",
        test="tests/families/test_short_clips.py::"
        "test_a_processor_that_caps_the_pixels_of_each_frame_is_refused_where_the_installed_class_does",
        oracle="the definition",
        edits=(("families/qwen_vl.py", 'hasattr(type(self.videos), "cap_pixels_per_frame")', "False"),),
    ),
    Mutation(
        trap=84,
        name="images are resized by a method that computes another size",
        test="tests/families/test_no_floats.py::"
        "test_a_processor_that_computes_the_size_in_its_resize_still_gives_bytes[image_processor]",
        oracle="Hugging Face's processor",
        edits=(("families/pixel_forms.py", "_resize_of(kind)(", "type(processor).resize("),),
    ),
    Mutation(
        trap=84,
        name="times that Ernie draws are float64",
        test=FROM_FILES + "[ernie4_5_vl-setting23]",
        oracle="Hugging Face's processor",
        edits=(
            (
                "families/ernie4_5_vl.py",
                "return tuple((torch.tensor(indices, dtype=torch.int32) / fps).tolist())",
                "return super()._seconds(media, indices, fps)",
            ),
        ),
    ),
    Mutation(
        trap=148,
        name="packs of Pixtral hold any number of patches",
        test="tests/families/test_pixtral_against_processor.py::"
        "test_without_a_limit_of_patches_the_models_mask_over_a_pack_stays_within_its_bytes",
        oracle="`generate_block_attention_mask` of transformers",
        edits=(
            (
                "energon/task_encoder.py",
                "packing.max_patches_per_pack or min(of_family, default=None)",
                "packing.max_patches_per_pack",
            ),
        ),
    ),
    Mutation(
        trap=148,
        name="plans for Pixtral have packs of any number of patches",
        test="tests/offline/test_planner.py::"
        "test_a_plan_keeps_the_limit_of_patches_of_the_family_that_was_measured_where_none_is_set[pixtral-None-2]",
        oracle="`generate_block_attention_mask` of transformers",
        edits=(
            (
                "kinds/conversations.py",
                "packing.max_patches_per_pack or MOST_PATCHES.get(family)",
                "packing.max_patches_per_pack",
            ),
        ),
    ),
    Mutation(
        trap=51,
        name="a state of packs without a limit of patches fits packs with one",
        test="tests/families/test_pixtral_against_processor.py::"
        "test_without_a_limit_of_patches_the_models_mask_over_a_pack_stays_within_its_bytes",
        oracle="the definition",
        edits=(
            (
                "energon/task_encoder.py",
                'settings_of("packing", dataclasses.replace(self.packing, max_patches_per_pack=self.limits.patches))',
                'settings_of("packing", self.packing)',
            ),
        ),
    ),
    Mutation(
        trap=148,
        name="samples are measured under the limit of a pack",
        test="tests/families/test_pixtral_against_processor.py::"
        "test_a_limit_of_patches_that_is_set_and_a_measurement_and_a_trainers_packing_know_no_other",
        oracle="the definition",
        edits=(("kinds/conversations.py", "max_patches_per_pack=NO_ROW, ", ""),),
    ),
)
