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
    160: "LLaVA pads or cuts a row under its boundaries",
    161: "rows are as long as the vision model's sequence",
    162: "a reduction waits for the gradient of an encoder that a pack of text does not reach",
    163: "validate accepts what the run refuses",
    180: "rows that are packed are packed again",
    181: "second predicted tokens are trained where the installed step or layout weighs them wrongly",
    182: "the run and validate judge arguments by other rules",
    183: "layers of a hybrid model get the mask of other tokens than theirs",
    184: "a step that is run again sees other pixels than the first time",
}

FAMILIES = "tests/conformance/test_megatron_lm_models.py::"
IN_BATCH = "tests/conformance/test_in_batch_mode.py::"
GLM = "tests/families/test_glm4v_against_processor.py::"
WORKERS = "tests/energon/test_workers.py::"
RULES = "tests/validate/test_rules.py::"
STEP = "tests/conformance/test_packed_forward_step.py::"
ARGUMENTS = "tests/conformance/test_megatron_lm_arguments.py::"

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
        edits=(("megatron_lm/dataloader.py", "    put_mask(params, of_layers)  #", "    pass  #"),),
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
        edits=(("megatron_lm/dataloader.py", "    params.seq_idx = segments  #", "    params.seq_idx = None  #"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=150,
        name="boundaries of samples do not reach layers with a state",
        test="tests/conformance/test_bridge_parity.py::"
        "test_a_layer_with_a_state_gives_each_sample_its_own_results[mamba-between]",
        oracle="Megatron-Core's layer on the samples alone",
        edits=(("thd/batch.py", "    if not total_tokens:\n", "    if True:\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=160,
        name="a row is brought to what its samples need, and LLaVA pads it further",
        test=FAMILIES + "test_llavas_rows_have_the_length_to_which_it_pads_before_it_pads_them[False-False-2-2-60-64]",
        oracle="the shard factor of Megatron-Core's `_process_embedding_token_parallel`",
        edits=(("megatron_lm/vlm.py", "tokens + get_padding(tokens, *sizes)", "-(-tokens // 4) * 4"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=160,
        name="a row longer than LLaVA's language model reaches it",
        test=FAMILIES + "test_a_row_that_llava_would_cut_is_refused_before_it_runs",
        oracle="the length that the model was built with",
        edits=(("megatron_lm/vlm.py", "max(tokens, width) > most or get_padding(width, *sizes)", "False"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=160,
        name="a row is filled up without a boundary at its end",
        test=FAMILIES + "test_a_widened_row_is_the_row_assembled_at_that_width[False-8]",
        oracle="the row assembled at that width",
        edits=(("thd/batch.py", "cu_seqlens=ended(batch.cu_seqlens),", "cu_seqlens=batch.cu_seqlens,"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=161,
        name="--decoder-seq-length of examples/multimodal is not read",
        test="tests/conformance/test_megatron_lm_arguments.py::"
        "test_rows_of_megatron_lms_own_scripts_are_as_long_as_their_language_model_reads"
        "[--seq-length 576 --decoder-seq-length 2048-2048]",
        oracle="the argument file of `examples/multimodal/sft_mistral_clip.sh`",
        edits=(
            ("megatron_lm/arguments.py", '"dataloader_seq_length", "decoder_seq_length",', '"dataloader_seq_length",'),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=162,
        name="packs of text are refused for the families of a list, in which others are missing",
        test="tests/conformance/test_rules_of_bridge.py::"
        "test_every_model_of_bridge_that_can_freeze_an_encoder_is_asked_what_a_pack_without_media_does",
        oracle="the settings of Bridge's own providers",
        edits=(
            (
                "validate/rules/families.py",
                "view.overlap_grad_reduce is not None and view.sees_or_hears",
                'view.overlap_grad_reduce is not None and view.family.startswith(("qwen25vl", "qwen3vl", "llava"))',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=162,
        name="Megatron-LM's vision step does not ask what waits for the encoders' gradient",
        test=FAMILIES
        + "test_encoders_that_a_pack_of_text_leaves_without_gradient_are_refused_where_something_waits_for_it"
        "[overlap_grad_reduce]",
        oracle="the parameters of a `LLaVAModel`",
        edits=(("megatron_lm/vlm.py", "if waits and trained and", "if False and"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=163,
        name="without a look at the data, arguments that the run refuses are valid",
        test="tests/conformance/test_megatron_lm_arguments.py::"
        "test_validate_refuses_the_arguments_that_the_run_refuses_with_megatron_lms_own_parser[{}---full-validation-True]",
        oracle="`parse_and_validate_args` of Megatron-LM, as the run calls it",
        edits=(("cli/validate.py", "if data or reads.problem else None", "if data else None"),),
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
    Mutation(
        trap=180,
        name="a scheduler that packs rows again passes in a Bridge configuration",
        test=RULES + "test_a_rule_of_ours_speaks_when_broken_and_is_content_when_fixed",
        oracle="Bridge's coming setting, which drives Megatron-Core's scheduler",
        edits=(
            (
                "validate/rules/packing.py",
                'packing and (view.sequence_packing_scheduler is None or view.source == "argument")',
                "packing",
            ),
        ),
    ),
    Mutation(
        trap=180,
        name="Megatron-LM's data sets of unequal rows pack ours again",
        test=ARGUMENTS + "test_what_cannot_work_is_refused_with_its_name",
        oracle="the argument's own meaning",
        edits=(("megatron_lm/arguments.py", '("use_varlen_dataset",)', "()"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=181,
        name="second tokens are predicted without a loss mask",
        test=STEP + "test_second_predicted_tokens_are_refused_exactly_where_bridges_step_gives_the_model_no_loss_mask"
        "[gpt-Qwen3MoE]",
        oracle="what Bridge's step calls the model with",
        edits=(("validate/rules/steps.py", "if view.goes_through_gpt_step:", "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=181,
        name="second tokens are weighed by each rank's own counts",
        test=RULES + "test_several_predicted_tokens_are_judged_by_what_the_installed_step_and_layout_do",
        oracle="Megatron-Core's loss of them on two ranks (test_bridge_parity.py)",
        edits=(("validate/rules/steps.py", "    elif view.wide:", "    elif False:"),),
    ),
    Mutation(
        trap=182,
        name="the run asks no rule of validate",
        test=ARGUMENTS + "test_the_run_itself_refuses_what_only_rules_of_validate_know",
        oracle="the verdict of validate on the same arguments",
        edits=(("megatron_lm/dataloader.py", "    enforce_rules(args, config)\n", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="rules never see the choice of attention kernels, because they read it by another name",
        test=ARGUMENTS + "test_every_argument_that_rules_read_is_one_of_megatron_lm",
        oracle="the installed Megatron-LM's parser",
        edits=(("validate/run_view.py", 'argument="--attention-backend"', "argument=True"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="rules are asked only after the model is built",
        test=ARGUMENTS + "test_validate_refuses_the_arguments_that_the_run_refuses_with_megatron_lms_own_parser",
        oracle="the verdict of validate on the same arguments",
        edits=(
            ("megatron_lm/dataloader.py", "    enforce_rules(args, run_config_of(args))", "    run_config_of(args)"),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="the batch of the evaluation is taken to be that of the training",
        test=ARGUMENTS + "test_what_megatron_lms_own_parser_asserts_of_batches_and_lengths_is_an_error_of_validate",
        oracle="Megatron-LM's own parser on the same arguments",
        edits=(
            (
                "validate/run_view.py",
                'eval_global_batch_size: int | None = at(None, bridge="validation.", ours="training.", argument=True)',
                'eval_global_batch_size: int | None = at(None, bridge="validation.", ours="training.")',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="the length of rows is judged as if it were --seq-length",
        test=ARGUMENTS + "test_validate_refuses_the_arguments_that_the_run_refuses_with_megatron_lms_own_parser",
        oracle="Megatron-LM's own parser on the same arguments",
        edits=(
            (
                "validate/run_source.py",
                '    fields["dataset_seq_length"] = row_length(',
                '    fields["dataset_seq_length"] = fields["model_seq_length"] = row_length(',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="one replica's micro-batch is taken for the global batch",
        test=ARGUMENTS + "test_without_a_global_batch_the_run_and_validate_take_a_micro_batch_of_each_replica",
        oracle="Megatron-LM's own parser on the same arguments",
        edits=(("validate/run_source.py", "view.micro_batch_size * view.data_parallel)", "view.micro_batch_size)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="Megatron-Core's own graphs of layers are refused as Bridge refuses them",
        test=ARGUMENTS + "test_validate_refuses_the_arguments_that_the_run_refuses_with_megatron_lms_own_parser",
        oracle="Megatron-Core, which compares every input of a replay with the captured ones",
        edits=(
            (
                "validate/rules/packing.py",
                'view.cuda_graph_impl != "none" and view.source != "argument",',
                'view.cuda_graph_impl != "none",',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=182,
        name="the older name of what graphs capture is overlooked",
        test=ARGUMENTS + "test_the_older_name_of_what_graphs_capture_is_read_too",
        oracle="the argument's older name",
        edits=(("validate/run_source.py", '{"--cuda-graph-modules": "cuda_graph_scope"}', "{}"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=183,
        name="a row carries its mask for vision models only",
        test=FAMILIES
        + "test_a_layer_with_experts_gets_the_mask_of_its_own_tokens_where_the_model_hands_it_that_of_all",
        oracle="the mask of the rank's tokens; `pretrain_hybrid.py` with sequence parallelism stops at its first step",
        edits=(
            (
                "megatron_lm/dataloader.py",
                "    put_mask(params, of_layers)  #",
                "    if whole_row: put_mask(params, of_layers)  #",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=184,
        name="our step frees the pixels of a batch that is kept to be run again",
        test=STEP + "test_a_step_that_bridge_runs_again_sees_the_rows_and_pixels_of_the_first_time",
        oracle="Megatron-Core's own iterator, which repeats a step",
        edits=(
            (
                "bridge/step.py",
                "        return step(state, iter((batch,)), model, return_schedule_plan)",
                "        done = step(state, iter((batch,)), model, return_schedule_plan)\n"
                '        batch["visual_inputs"].pixel_values = None\n'
                "        return done",
            ),
        ),
        needs_bridge=True,
    ),
)
