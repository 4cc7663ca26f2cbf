"""The traps of Gemma 3, Pixtral, GLM-4.1V and Ernie 4.5 VL; what a row means is told in `mutation_table`."""

from __future__ import annotations

from mutation_table import Mutation

GEMMA = "tests/families/test_gemma3_against_processor.py::"
PIXTRAL = "tests/families/test_pixtral_against_processor.py::"
GLM = "tests/families/test_glm4v_against_processor.py::"
GLM_MIXED = "tests/families/test_glm4v_mixed_packs.py::"
ERNIE = "tests/families/test_ernie4_5_vl_against_processor.py::"
WHOLE_GLM = GLM + "test_tokens_types_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample"

FAMILY_TRAPS = {
    51: "a setting that changes packs is not in the fingerprint of the state, or the data set depends on its workers"
}

FAMILY_MUTATIONS: tuple[Mutation, ...] = (
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
                "runs=(self.square_tokens,) * squares",
                "runs=(self.square_tokens,)",
            ),
        ),
    ),
    Mutation(
        trap=22,
        name="a token of a Pixtral image is taken for a pixel larger",
        test=PIXTRAL + "test_an_image_of_any_size_costs_the_tokens_that_the_processor_says",
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
                "encoders/joinable_rows.py",
                "(0, width - images.shape[-1], 0, height - images.shape[-2])",
                "(width - images.shape[-1], 0, height - images.shape[-2], 0)",
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
        test=ERNIE + "test_tokens_types_pixels_and_positions_equal_the_processor_and_model_on_the_whole_sample",
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
                "frames_indices=list(plan.timestamps)",
                "frames_indices=list(range(len(plan.timestamps)))",
            ),
        ),
    ),
    Mutation(
        trap=22,
        name="a pack of images and videos goes to GLM's model as the processor names them",
        test=GLM_MIXED + "test_the_model_refuses_a_row_that_holds_images_and_videos_and_takes_ours",
        oracle="Hugging Face's model",
        edits=(("encoders/joinable_rows.py", "rows = videos_as_images([", "rows = list(["),),
    ),
    Mutation(
        trap=23,
        name="GLM's videos come before the images of their sample",
        test=GLM_MIXED + "test_every_token_of_a_pack_gets_the_feature_and_the_position_that_it_has_in_its_sample_alone",
        oracle="Hugging Face's model",
        edits=(
            (
                "encoders/shared_placeholder.py",
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
        edits=(("encoders/encoder_fingerprint.py", '"do_pan_and_scan", ', ""),),
    ),
)
