"""The traps of fields per token on their way to a model, in Bridge and in Megatron-LM; see `mutation_table`."""

from mutation_table import Mutation

MEGATRON_LM_TRAPS = {
    81: "a field that the family needs does not reach the model",
    82: "integer token types become floats in a filler row",
    149: "a copy to the GPU waits for it, or runs while a CUDA graph is captured",
    150: "a layer with a state takes it from one sample to the next",
    154: "an argument that changes the loss or the data is ignored",
    155: "a process that is no rank of the replica keeps it waiting or gets its packs",
    156: "a run of Megatron-LM that saves its model cannot be continued",
    157: "a signal that is meant for the rank ends the processes that its checkpoint needs",
}

FAMILIES = "tests/conformance/test_megatron_lm_models.py::"
IN_BATCH = "tests/conformance/test_in_batch_mode.py::"
WORKERS = "tests/energon/test_workers.py::"
ARGUMENTS = "tests/conformance/test_megatron_lm_arguments.py::"
GLM = "tests/families/test_glm4v_against_processor.py::"

MEGATRON_LM_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=81,
        name="Megatron-LM's vision step leaves out the types of tokens",
        test=FAMILIES + "test_a_models_losses_are_those_of_bridges_step_types_of_tokens_included[ernie4_5_vl]",
        oracle="Bridge's `vlm_step` on the same row",
        edits=(("megatron_lm/gpt.py", "**batch.model_inputs}", "}"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=81,
        name="Megatron-LM's vision step normalises Ernie's bytes, which the model normalises again",
        test=FAMILIES + "test_a_models_losses_are_those_of_bridges_step_types_of_tokens_included[ernie4_5_vl]",
        oracle="Bridge's `vlm_step` on the same row",
        edits=(("megatron_lm/dataloader.py", "part.media_of_model()", "part.finished().visual_inputs"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=81,
        name="Bridge leaves a model's missing argument out in silence",
        test=FAMILIES + "test_a_model_that_does_not_take_what_the_family_needs_is_refused_before_it_runs[Bridge-glm4v]",
        oracle="the signature of the model's forward",
        edits=(("bridge/step.py", "refuse_untaken(inner, fields,", "refuse_untaken(inner, [],"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=81,
        name="Megatron-LM's experts get no padding mask from a whole row",
        test=FAMILIES + "test_the_experts_of_a_vision_model_get_the_padding_of_the_row",
        oracle="the padding mask of the row",
        edits=(("megatron_lm/dataloader.py", "        put_mask(params, of_layers)", "        pass"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=82,
        name="a filler row has fractions for types of tokens",
        test=IN_BATCH
        + "test_types_of_tokens_stay_whole_numbers_beside_a_filler_row_as_the_processor_makes_them[False]",
        oracle="Hugging Face's processor",
        edits=(("bridge/dataset.py", "field.filled(1) for field", "field.filled(1).float() for field"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=82,
        name="a padded dummy image keeps types of tokens of its old length",
        test=GLM + "test_a_pack_of_text_alone_has_types_too_and_a_dummy_image_its_own[3]",
        oracle="the definition",
        edits=(("energon/dummy_image.py", "for field in (*TOKEN_FIELDS, *fields)", "for field in TOKEN_FIELDS"),),
    ),
    Mutation(
        trap=149,
        name="slices of a row are copied from memory that is not page-locked",
        test=FAMILIES + "test_what_a_rank_copies_to_its_gpu_is_page_locked_slices_too[False]",
        oracle="the definition",
        edits=(("megatron_lm/dataloader.py", 'if device().type == "cuda":  # slices', "if False:  # slices"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=149,
        name="packs are copied ahead in Bridge while a CUDA graph is captured",
        test="tests/conformance/test_resumed_state.py::"
        "test_no_thread_copies_to_a_gpu_where_cuda_graphs_are_captured[graphs1-0]",
        oracle="the threads of the process",
        edits=(
            ("bridge/provider.py", 'data=config.data.beside(getattr(self._run, "model", None))', "data=config.data"),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=149,
        name="packs are copied ahead in Megatron-LM while a CUDA graph is captured",
        test="tests/conformance/test_megatron_lm_arguments.py::"
        "test_no_packs_are_made_ahead_where_cuda_graphs_are_captured",
        oracle="the definition",
        edits=(("megatron_lm/arguments.py", "data=data.beside(args)", "data=data"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=150,
        name="Megatron-LM's layers with a state do not know the samples of a row",
        test=FAMILIES + "test_layers_with_a_state_get_the_numbers_of_the_samples[real_padding]",
        oracle="`PackedSeqParams` of Megatron-Core, told the length of the row",
        edits=(("megatron_lm/dataloader.py", "    params.seq_idx = segments", "    params.seq_idx = None"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=150,
        name="boundaries of samples do not reach layers with a state",
        test="tests/conformance/test_bridge_parity.py::"
        "test_a_layer_with_a_state_gives_each_sample_its_own_results[mamba-between]",
        oracle="Megatron-Core's layer on the samples alone",
        edits=(("thd/batch.py", '        values["total_tokens"] = batch.total_tokens\n', "        pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=154,
        name="iterations to skip reach the trainer, which stops on some ranks",
        test=ARGUMENTS
        + "test_what_changes_the_loss_or_the_data_is_refused_by_the_run_and_by_validate[iterations_to_skip]",
        oracle="the parser of the installed Megatron-LM",
        edits=(("megatron_lm/arguments.py", """(value(name), f"--{name""", """(False, f"--{name"""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=154,
        name="an argument of distillation is not on the list",
        test=ARGUMENTS
        + "test_every_argument_of_megatron_lm_is_read_or_refused_or_known_to_change_neither_loss_nor_data",
        oracle="the parser of the installed Megatron-LM",
        edits=(
            (
                "megatron_lm/arguments.py",
                '("logits_load_dir", "export_kd_teacher_load")',
                '("export_kd_teacher_load",)',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=154,
        name="a row of many targets seems to have a large loss",
        test=ARGUMENTS + "test_an_unexpectedly_large_loss_is_found_and_a_row_of_many_targets_is_none",
        oracle="Megatron-Core's `is_unexpectedly_large`",
        edits=(("megatron_lm/gpt.py", "(loss / total.clamp(min=1), large,", "(loss, large,"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=155,
        name="a rank waits for the greeting of whoever connected first",
        test="tests/energon/test_replica.py::test_whoever_connects_and_says_nothing_keeps_no_rank_waiting",
        oracle="the definition",
        edits=(("energon/replica_channel.py", "for each in ready:", "for each in greeting[::-1]:"),),
    ),
    Mutation(
        trap=155,
        name="a process of another user is taken for a rank",
        test="tests/energon/test_replica.py::test_a_rank_that_does_not_greet_in_time_is_named[of another user]",
        oracle="the user of the connection, from the kernel",
        edits=(("energon/replica_channel.py", "[connection] if user == os.geteuid() else []", "[connection]"),),
    ),
    Mutation(
        trap=156,
        name="no state of the loader is saved beside the model",
        test=ARGUMENTS + "test_a_run_that_saves_its_model_saves_its_data_beside_it_and_continues_from_there",
        oracle="Megatron-LM's `maybe_save_dataloader_state`",
        edits=(("megatron_lm/dataloader.py", "if args.save and not args.dataloader_save:", "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=156,
        name="a run that only evaluates asks for a state",
        test=ARGUMENTS + "test_a_run_that_only_evaluates_needs_no_state_and_reads_no_training_data",
        oracle="the definition",
        edits=(("megatron_lm/dataloader.py", "or (not made and args.skip_train):", "or False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=157,
        name="a worker ends by the scheduler's signal",
        test=WORKERS + "test_a_signal_to_all_processes_of_a_job_is_left_to_the_rank_and_costs_no_pack[2]",
        oracle="the loader that gets no signal",
        edits=(("energon/workers.py", "        leave_to_rank()\n    use", "        pass\n    use"),),
    ),
    Mutation(
        trap=157,
        name="a decoding child ends by the scheduler's signal",
        test=WORKERS + "test_a_signal_to_all_processes_of_a_job_is_left_to_the_rank_and_costs_no_pack[0]",
        oracle="the loader that gets no signal",
        edits=(("media/decoding_process.py", "for number in (signal.SIGINT, signal.SIGTERM):", "for number in [2]:"),),
    ),
    Mutation(
        trap=157,
        name="a worker leaves its own rank's signal to the rank, too",
        test=WORKERS + "test_a_worker_still_ends_when_its_own_rank_ends_it",
        oracle="torch's `DataLoader`, which ends its workers so",
        edits=(("energon/workers.py", ".si_pid != os.getppid():", ".si_pid:"),),
    ),
)
