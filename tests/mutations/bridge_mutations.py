"""Traps of Megatron-Bridge's models and kernels, each with its bug put back; see `mutation_table`."""

from mutation_table import Mutation

BRIDGE_TRAPS = {
    146: "frequencies of a vision encoder are rounded with its weights",
    48: "rows are aligned to a layout that the model's `finalize()` changes afterwards",
    49: "the padding mask of experts travels by hooks, which CUDA graphs bypass",
    50: "sequence parallelism on images of Qwen3-VL loses gradients",
    78: "a padding mask of `[tokens]` meets a routing map of `[tokens, experts]` in the router's bias",
    79: "an in-place all-reduce makes the balance loss TP x CP times too strong",
    80: "a pack is one sequence to `seq_aux_loss`",
    144: "a fused router gets a fraction where it takes an integer",
    97: "ranks go on with different data, settings, plans, states or positions",
    98: "a state waits for ever for a worker that was killed",
    99: "a comment in a YAML file makes another data set of it",
    100: "a command fails for want of file locks when its work is done",
    101: "every reader opens every shard when it starts, and makes the groups of all replicas",
    151: "the host waits in every layer to read boundaries that it knows",
    152: "the second and later clips of a row have the positions of the first",
    153: "a Wan model is fine-tuned on other texts, times or noise than it knows",
    170: "clips have positions of another clip where ranks share their row",
    171: "a run passes its check whose step cannot read its rows",
    173: "clips that Bridge's own script prepared cannot be trained",
    175: "a check changes what its run wrote",
}

NATIVE = "tests/validate/test_rules.py::"
LAYOUT = "tests/conformance/test_dataset_config.py::"
IMAGES = "test_sequence_parallelism_that_loses_gradients_of_images_is_refused_also_where_the_model_turns_it_on"
CLIPS = "tests/conformance/test_wan_in_bridge.py::test_"
WAITS = "tests/conformance/test_host_waits.py::test_"
OF_TOKENS = WAITS + "no_layer_reads_the_boundaries_of_a_row_whose_tokens_have_frequencies_of_their_own"
TOGETHER = "tests/conformance/test_ranks_together.py::"
GRADIENTS = "tests/conformance/test_gloo_gradients.py::"
ONE_RANK = "the gradient of Bridge's own step on one rank, without padding"
PROVIDER = "`Qwen3VLMoEModelProvider.finalize` of the installed Bridge"

BRIDGE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=48,
        name="the layout is read from the model as it was given",
        test=LAYOUT + "test_rows_are_aligned_to_what_the_provider_has_after_its_own_finalize",
        oracle=PROVIDER,
        edits=(("validate/recipes.py", "        changed.finalize()\n", "        pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=48,
        name="a data set with a run aligns without sequence parallelism",
        test=LAYOUT + "test_a_model_that_is_changed_after_validate_is_read_when_the_iterators_are_built",
        oracle=PROVIDER,
        edits=(("bridge/provider.py", "(run is None or bool(finalised(run.model).sequence_parallel))", "run is None"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=48,
        name="our YAML is judged without what its model turns on",
        test=LAYOUT + "test_our_yaml_is_judged_with_what_its_model_turns_on",
        oracle=PROVIDER,
        edits=(
            (
                "validate/run_source.py",
                "forced = view.model_forces_sequence_parallel and",
                "forced = not view.model_forces_sequence_parallel and",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=49,
        name="our step runs under Transformer Engine's graphs",
        test="tests/conformance/test_packed_forward_step.py::"
        "test_experts_under_transformer_engines_graphs_are_refused_before_they_count_padding",
        oracle="`GraphableMegatronModule.__call__` of the installed Megatron-Core",
        edits=(("bridge/step.py", "                _refuse_graphs(model, step)\n", "                pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=49,
        name="runs with graphs are sent to the step whose hooks they bypass",
        test="tests/validate/test_rules.py::test_nobody_is_sent_to_our_step_where_its_hooks_are_bypassed",
        oracle="`GraphableMegatronModule.__call__` of the installed Megatron-Core",
        edits=(
            (
                "validate/rules/steps.py",
                "fix = f\"set cuda_graph_impl to 'none' and {fix}\"",
                "pass",
            ),
        ),
    ),
    Mutation(
        trap=50,
        name="sequence parallelism of Qwen3-VL is let through",
        test=LAYOUT + IMAGES,
        oracle="gradient norms of TP 2 with and without sequence parallelism",
        edits=(
            (
                "validate/rules/families.py",
                "unless(not view.sequence_parallel, why",
                "unless(view.sequence_parallel, why",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=50,
        name="only the command knows of it",
        test=LAYOUT + IMAGES,
        oracle="gradient norms of TP 2 with and without sequence parallelism",
        edits=(
            (
                "bridge/dataset.py",
                "        if judgement.finding is not None:\n",
                '        if judgement.rule.origin == "bridge" and judgement.finding is not None:\n',
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=1,
        name="rows of Bridge's own packing pass for single samples",
        test=NATIVE + "test_rows_of_bridges_own_packing_are_packed_rows_from_0_7_on",
        oracle="`EnergonDatasetConfig` of Bridge 0.7",
        edits=(
            (
                "validate/run_view.py",
                "self.enable_in_batch_packing or self.packs_natively\n",
                "self.enable_in_batch_packing\n",
            ),
        ),
    ),
    Mutation(
        trap=18,
        name="padding may take an expert's room in silence",
        test=NATIVE + "test_experts_with_a_capacity_are_warned_of_padding_that_takes_their_room",
        oracle="`TopKRouter.routing` of Megatron-Core, which drops tokens without the padding mask",
        edits=(
            (
                "validate/rules/steps.py",
                "0) > 0,\n    holds=lambda view: view.multiple == 1 and not view.rows_of_one_width,",
                "0) > 0,\n    holds=lambda view: not view.rows_of_one_width,",
            ),
        ),
    ),
    Mutation(
        trap=49,
        name="graphs with a router are refused for our rows only",
        test=NATIVE + "test_graphs_with_a_router_are_refused_where_0_7_gives_it_a_padding_mask[scopes2-gpt_step]",
        oracle="`_validate_packed_moe_cuda_graph` of Bridge 0.7",
        edits=(
            (
                "validate/rules/steps.py",
                "(view.enable_offline_packing or view.multiple > 1)",
                "False",
            ),
        ),
    ),
    Mutation(
        trap=78,
        name="the mask meets the routing map as Megatron-Core 0.19 has it",
        test=GRADIENTS + "test_ranks_train_experts_as_one_rank_does_without_padding[glm4v_moe-one-True]",
        oracle=ONE_RANK,
        edits=(("thd/routers.py", "routing_map & ~padding_mask.reshape(-1, 1)", "routing_map & ~padding_mask"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=78,
        name="padding counts for the router's bias",
        test=GRADIENTS + "test_ranks_train_experts_as_one_rank_does_without_padding[glm4v_moe-one-True]",
        oracle="the tokens of each expert that Megatron-Core counts on rows without padding",
        edits=(("thd/routers.py", "routing_map & ~padding_mask.reshape(-1, 1)", "routing_map"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=79,
        name="each rank counts the tokens of the whole row",
        test=GRADIENTS + "test_ranks_train_experts_as_one_rank_does_without_padding[qwen3_vl-cp2-True]",
        oracle=ONE_RANK,
        edits=(("thd/routers.py", "= count / group.size()", "= count"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=79,
        name="each rank counts its own tokens, though padding lies on the last",
        test=GRADIENTS + "test_ranks_train_experts_as_one_rank_does_without_padding[qwen3_vl-cp2-True]",
        oracle=ONE_RANK,
        edits=(
            ("thd/routers.py", "        if group.size() > 1:\n", "        if group.size() < 1:\n"),
            ("thd/routers.py", "= count / group.size()", "= count"),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=79,
        name="a row of padding alone makes every gradient NaN",
        test="tests/conformance/test_gloo_gradients.py::test_a_row_of_padding_alone_trains_no_router",
        oracle="Megatron-Core's router, on a row of padding",
        edits=(("thd/routers.py", "if mask is not None and scores_for_aux_loss.requires_grad:", "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=144,
        name="the fused balance loss of Transformer Engine gets a divided count",
        test=GRADIENTS + "test_a_fused_router_trains_under_a_mask_as_one_that_is_not_fused[aux_loss]",
        oracle="Megatron-Core's own balance loss, and what the kernel of 2.18 checks",
        edits=(("thd/routers.py", "        router.config.moe_router_fusion = False\n", "        pass\n"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=80,
        name="a router that balances sequences is let through",
        test=GRADIENTS + "test_a_router_that_balances_sequences_is_refused_before_it_takes_a_pack_for_one[text]",
        oracle="`TopKRouter.get_aux_loss_coeff` of the installed Megatron-Core",
        edits=(("thd/routers.py", '("seq_aux_loss") > 0', '("seq_aux_loss") > 1'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=80,
        name="a run that balances sequences is let through",
        test="tests/conformance/test_dataset_config.py::"
        "test_a_balance_of_sequences_is_refused_with_the_loss_that_it_would_be",
        oracle="`moe_router_load_balancing_type` of Bridge's provider",
        edits=(("validate/rules/steps.py", '"seq_aux_loss", 0.0) <= 0', '"seq_aux_loss", 0.0) <= 1'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=97,
        name="ranks that differ go on",
        test=TOGETHER + "test_ranks_that_would_read_different_things_all_refuse_and_name_the_rank_and_both_values",
        oracle="two ranks of Bridge's own set-up",
        edits=(
            (
                "energon/replica.py",
                "if highest != -lowest or of_reading not in (-least_of_reading, nobody):",
                "if highest != -lowest:",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=97,
        name="a rank of a plan takes the file of its own number",
        test=TOGETHER + "test_a_state_of_an_earlier_attempt_is_never_restored_beside_those_of_this_one",
        oracle="the run that never stopped",
        edits=(
            (
                "bridge/provider.py",
                "rank = 0 if planned else replica.rank",
                "rank = replica.rank",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=97,
        name="states of different steps are restored",
        test=TOGETHER + "test_a_state_of_an_earlier_attempt_is_never_restored_beside_those_of_this_one",
        oracle="two ranks of Bridge's own set-up",
        edits=(
            (
                "energon/replica_reader.py",
                'return state, ({"packs taken before the restart": state["packs"], **own, **saved}, {})',
                "return state, (saved, {})",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=98,
        name="Energon asks its workers without looking at them",
        test="tests/energon/test_workers.py::"
        "test_a_state_that_a_killed_worker_would_have_to_give_is_refused_within_seconds",
        oracle="a worker that the kernel kills",
        edits=(
            (
                "energon/loader.py",
                "answered(functools.partial(_state_of_rank, loader, self._patience), workers)",
                "loader.save_state_rank()",
            ),
        ),
    ),
    Mutation(
        trap=99,
        name="the text of a YAML file counts",
        test="tests/energon/test_states.py::test_a_state_belongs_to_what_a_yaml_file_says_not_to_how_it_is_written",
        oracle="Energon's own reader of YAML",
        edits=(("energon/data_identity.py", "return repr(_ordered(load_yaml(content))).encode()", "return content"),),
    ),
    Mutation(
        trap=100,
        name="a lock that the file system refuses ends the command",
        test="tests/offline/test_pack_command.py::"
        "test_convert_measure_plan_and_pack_go_on_without_locks_and_say_so_before_they_work",
        oracle="what `flock` and `lockf` return on such file systems",
        edits=(("line_file.py", "if error.errno not in _NO_LOCKS:", "if error.errno:"),),
    ),
    Mutation(
        trap=101,
        name="what another rank told of the shards is not used",
        test="tests/energon/test_replica.py::test_one_rank_opens_the_shards_and_tells_the_others_what_they_are",
        oracle="Python's audit of opened files",
        edits=(("energon/data_identity.py", "    if told is not None:\n", "    if told is not None and not place:\n"),),
    ),
    Mutation(
        trap=101,
        name="every rank makes the groups of all replicas",
        test="tests/energon/test_replica.py::"
        "test_a_replica_of_4096_ranks_makes_one_group_by_its_leaders_alone_and_hears_of_its_own_ranks_only",
        oracle="the definition",
        edits=(
            (
                "energon/replica.py",
                "                leader_group = OwnGroup(leaders, here, name)\n",
                "                leader_group = OwnGroup(leaders, here, name)\n"
                "            distributed.new_group(leaders)\n",
            ),
        ),
    ),
    Mutation(
        trap=146,
        name="frequencies of a vision encoder stay in bfloat16",
        test="tests/conformance/test_bridge_parity.py::"
        "test_a_vision_encoder_in_bfloat16_keeps_the_angles_of_hugging_face",
        oracle="Qwen2.5-VL of transformers",
        edits=(
            (
                "thd/rotary.py",
                "module.inv_freq, restored = exact.to(rounded.device)",
                "module.inv_freq, restored = rounded",
            ),
        ),
    ),
    Mutation(
        trap=151,
        name="Megatron-Core cuts frequencies of single tokens at each boundary",
        test=OF_TOKENS + "[qwen2_5_vl-texts-1]",
        oracle="Megatron-Core's own reads",
        edits=(("bridge/step.py", "    repair_rotary(inner)\n", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=151,
        name="frequencies that samples share are taken for those of single tokens",
        test=OF_TOKENS + "[text-texts-1]",
        oracle="Megatron-Core's own rotary embedding",
        edits=(("thd/rotary.py", " or freqs.size(0) != t.size(0):", ":"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=151,
        name="Wan's cross attention is told the longest clip for the longest text",
        test=WAITS + "attention_of_clips_is_told_the_longest_and_no_layer_reads_boundaries",
        oracle="the lengths of the row",
        edits=(("wan/bridge.py", 'clip if name == "self_attention" else text', "clip"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=151,
        name="a rank's tokens are taken for the row where samples share a table",
        test=WAITS + "tables_are_those_of_megatron_core[2]",
        oracle="Megatron-Core's own rotary embedding",
        edits=(("thd/rotary.py", " or group.size() > 1", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=146,
        name="frequencies of a vision encoder stay rounded in Megatron-LM",
        test=WAITS + "megatron_lm_repairs_both",
        oracle="the number format",
        edits=(("megatron_lm/gpt.py", "    repair_rotary(innermost(model))\n", ""),),
        needs_bridge=True,
    ),
    Mutation(
        trap=152,
        name="a Wan recipe keeps its fused rotary embedding",
        test=CLIPS + "later_clips_have_their_own_positions_with_the_kernels_that_a_recipe_chooses[False]",
        oracle="each clip alone, with the documented rule of Transformer Engine's kernel",
        edits=(("wan/bridge.py", "model.apply_rope_fusion = False  #", "pass  #"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=152,
        name="a run with the fused rotary embedding is valid",
        test=CLIPS
        + "what_cannot_work_is_refused_before_any_gpu_is_taken[model.apply_rope_fusion-True-apply_rope_fusion is true]",
        oracle="the definition",
        edits=(("wan/bridge.py", "if model.apply_rope_fusion:", "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=153,
        name="fine-tuning draws the times of pretraining",
        test=CLIPS + "the_training_program_takes_the_step_of_the_rows_with_the_times_of_its_run",
        oracle="Bridge's `WanForwardStep`",
        edits=(("wan/bridge.py", '"finetune" if finetune else "pretrain"', '"pretrain"'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=153,
        name="padding of texts is hidden from weights that know it",
        test=CLIPS + "texts_as_the_weights_know_them_are_bridges_in_rows_of_our_alignment[shapes0]",
        oracle="the installed Bridge's `megatron.bridge.diffusion.data.wan`",
        edits=(
            ("wan/pack.py", '    if compat != "none":\n        texts =', '    if compat == "bridge":\n        texts ='),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=153,
        name="all replicas draw the same noise",
        test=CLIPS + "a_shipped_recipe_is_valid_and_makes_rows_of_its_alignment[wan_1_3b_text2video-8]",
        oracle="the definition",
        edits=(("wan/bridge.py", "container.rng.data_parallel_random_init = True", "pass"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=153,
        name="a lone clip with padded texts is admitted without room for its masked clip",
        test="tests/wan/test_clip_limits.py::test_a_lone_clip_that_the_limits_admit_can_be_packed",
        oracle="`pack_wan` under the limits of the run",
        edits=(("wan/config.py", 'compat != "bridge",', 'compat == "none",'),),
    ),
    Mutation(
        trap=170,
        name="the angles of a row are cut to its longest clip where ranks share it",
        test="tests/conformance/test_wan_over_ranks.py::"
        "test_each_clip_of_a_row_is_trained_as_it_is_alone_by_one_rank_and_by_two",
        oracle="each clip alone in Bridge's step",
        edits=(
            (
                "thd/rotary.py",
                "cu_seqlens, freqs, *more, **named)",
                "cu_seqlens, freqs[: cu_seqlens.diff().max()], *more, **named)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=171,
        name="rows of clips lack what Bridge's loss reads",
        test="tests/conformance/test_one_batch.py::test_a_row_of_clips_is_read_by_the_step_that_its_recipe_takes",
        oracle="Bridge's `WanForwardStep`",
        edits=(("wan/pack.py", '"context_embeddings", "loss_mask", *_LENGTH', '"context_embeddings", *_LENGTH'),),
        needs_bridge=True,
    ),
    Mutation(
        trap=173,
        name="channels and width of clips are not those of the model",
        test="tests/wan/test_bridges_script.py::"
        "test_a_data_set_of_the_script_is_converted_and_trained_by_the_commands[in its form-frames]",
        oracle="Bridge's `prepare_dataset_wan.py`, and its training",
        edits=(
            (
                "wan/bridge.py",
                "dataset.encoder.latent_channels, dataset.encoder.text_width = model.in_channels, model.text_dim",
                "dataset.encoder.text_width = model.text_dim",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=175,
        name="a loader that only looks writes the ledger",
        test="tests/conformance/test_one_batch.py::test_a_check_leaves_what_the_run_wrote_as_it_was",
        oracle="the bytes of the files before",
        edits=(
            (
                "ledger.py",
                "    return dataclasses.replace(run, packing=dataclasses.replace(run.packing, ledger=None))",
                "    return run",
            ),
        ),
        needs_bridge=True,
    ),
)
