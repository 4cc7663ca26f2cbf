"""The trap of a verdict on a run that was never looked at; what a row means is told in `mutation_table`."""

from mutation_table import Mutation

VALIDATE_TRAPS = {
    58: "a run is called valid although what it reads is missing, or its template leaves things out",
    85: "a processor of a neighbouring family fits until the first image",
    107: "code runs that a data set or a YAML of Bridge names",
    112: "a run that Bridge builds and trains is refused without a reason",
    117: "a setting is lost under a name that nothing reads, or a model that nobody looked at counts as sound",
    143: "a GPU has no kernel for the rows of a run that is called valid, or a setting that chooses one is ignored",
    142: "a run of the wrong schedule, or in the directory of another one, is called valid",
}

READS = "tests/cli/test_validate_data.py::"
OF_THE_MODEL = "tests/validate/test_processor_of_the_model.py::"
IN_DATA = (
    "tests/energon/test_code_in_data.py::"
    "test_code_that_a_data_set_names_runs_in_energon_and_not_in_our_loader_before_it_is_trusted"
)
IN_YAML = (
    "tests/conformance/test_names_in_bridges_yaml.py::"
    "test_what_bridge_runs_while_it_reads_a_file_is_refused_by_file_and_line_until_it_is_trusted"
)
DRAWN = (
    "tests/conformance/test_rules_of_bridge.py::"
    "test_no_drawn_run_is_refused_without_a_reason_or_accepted_where_bridge_cannot_build_it"
)
PAGE = "tests/conformance/test_packing_page_of_bridge.py::"
SHARDS = "tests/validate/test_shards.py::test_what_stops_or_starves_the_loader_is_an_error"
SCHEDULE = (
    "tests/conformance/test_dataset_config.py::"
    "test_the_decay_follows_an_override_of_the_iterations_and_a_run_saves_where_it_loads"
)

KERNELS = "tests/conformance/test_kernel_table.py::test_the_table_has_the_kernels_that_six_versions"
KERNELS += "_of_transformer_engine_chose"
JUDGED = "tests/validate/test_rules.py::test_a_rule_of_ours_speaks_when_broken_and_is_content_when_fixed"
OF_ENGINE = "Transformer Engine's `get_attention_backend` of that version, with cuDNN's rule"

VALIDATE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=143,
        name="cuDNN takes packed rows below sm90",
        test=KERNELS + "[2.17.1]",
        oracle=OF_ENGINE,
        edits=(("validate/kernel_table.py", "yield m.sm < 90,", "yield m.sm < 80,"),),
    ),
    Mutation(
        trap=143,
        name="Bridge's steps get two tensors of boundaries where padding is real",
        test="tests/thd/test_batch.py::"
        "test_padding_that_is_real_leaves_nothing_between_segments_and_every_sample_as_it_was[32]",
        oracle="Transformer Engine 2.18 and later, which see padding where two tensors are",
        edits=(("thd/batch.py", "cu_seqlens=physical, cu_seqlens_padded=None)", "cu_seqlens=physical)"),),
    ),
    Mutation(
        trap=143,
        name="FlashAttention 2 takes padding between samples",
        test="tests/cli/test_validate_gpu.py::test_a_run_is_judged_by_the_kernels_of_a_named_gpu[options0-1-kernels0]",
        oracle=OF_ENGINE,
        edits=(
            (
                "validate/kernel_table.py",
                'yield a.padded, "takes no padding between samples"  # later',
                'yield False, ""  # later',
            ),
        ),
    ),
    Mutation(
        trap=143,
        name="all_gather takes packed rows before Transformer Engine 2.18",
        test=KERNELS + "[2.15.0]",
        oracle=OF_ENGINE,
        edits=(("validate/kernel_table.py", '"all_gather": (2, 18)', '"all_gather": (2, 12)'),),
    ),
    Mutation(
        trap=143,
        name="a sliding window goes round a ring",
        test=KERNELS + "[2.9.0]",
        oracle="the assertions of `attn_forward_func_with_cp`",
        edits=(("validate/kernel_table.py", 'a.window and a.comm.endswith("p2p")', "False"),),
    ),
    Mutation(
        trap=143,
        name="sinks are computed by any cuDNN",
        test=KERNELS + "[2.18.0]",
        oracle=OF_ENGINE,
        edits=(("validate/kernel_table.py", 'or m.cudnn < (9, 18)), "takes sinks', '), "takes sinks'),),
    ),
    Mutation(
        trap=143,
        name="heads of MLA are as wide as kv_channels",
        test="tests/conformance/test_rules_of_bridge.py::test_the_heads_of_mla_are_as_wide_as_its_keys_and_values",
        oracle="Megatron-Core's `MLATransformerConfig`",
        edits=(("validate/recipes.py", 'if getattr(model, "multi_latent_attention", False):', "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=143,
        name="gated delta nets are deterministic over packed rows",
        test=JUDGED,
        oracle="the assertion of `GatedDeltaNet.forward`",
        edits=(
            (
                "validate/rules/kernels.py",
                "holds=lambda view: not view.deterministic_mode,",
                "holds=lambda view: True,",
            ),
        ),
    ),
    Mutation(
        trap=143,
        name="FlashAttention 3 takes padding between samples",
        test=KERNELS + "[2.17.1]",
        oracle="rows that it leaves as the memory was, see `gpu_check`",
        edits=(
            (
                "validate/kernel_table.py",
                'yield a.padded, "takes no padding between samples"  # later',
                'yield a.padded and old, "takes no padding between samples"  # later',
            ),
        ),
    ),
    Mutation(
        trap=143,
        name="attention in fp8 takes packed rows",
        test=JUDGED,
        oracle="cuDNN's rule in `fused_attn.cpp`",
        edits=(
            (
                "validate/rules/kernels.py",
                "holds=lambda view: view.machine is not None and view.machine.te >= (2, 20)",
                "holds=lambda view: view.machine is None or view.machine.te >= (2, 20)",
            ),
        ),
    ),
    Mutation(
        trap=143,
        name="rows of any width fit the buffers of overlapped communication",
        test=JUDGED,
        oracle="`_initialize_tp_communicators` of Bridge",
        edits=(
            (
                "validate/rules/kernels.py",
                "    holds=lambda view: view.rows_of_one_width,",
                "    holds=lambda view: True,",
            ),
        ),
    ),
    Mutation(
        trap=143,
        name="experts gather rows that differ in width",
        test=JUDGED,
        oracle="`gather_from_sequence_parallel_region`, which takes equal parts",
        edits=(("validate/rules/steps.py", "return unless(view.rows_of_one_width or inside,", "return unless(True,"),),
    ),
    Mutation(
        trap=143,
        name="the kernel of packed rows is logged at every step",
        test="tests/conformance/test_packed_forward_step.py::"
        "test_a_dense_model_trains_exactly_as_with_bridges_own_step_which_says_its_kernel_once[text-chosen1-said1]",
        oracle="the definition",
        edits=(
            (
                "bridge/step.py",
                "functools.cache(logging.getLogger(__name__).info)",
                "functools.lru_cache(maxsize=0)(logging.getLogger(__name__).info)",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=143,
        name="a backend that is a text counts as chosen",
        test="tests/conformance/test_rules_of_bridge.py::test_a_backend_that_is_a_text_is_warned_of_because_megatron_core_ignores_it",
        oracle="`LanguageModule._set_attention_backend`, which sets no variable",
        edits=(("validate/rules/kernels.py", 'if isinstance(text, str) and text != "auto":', "if False:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=143,
        name="variables of the environment are not read",
        test="tests/cli/test_validate_gpu.py::test_a_variable_that_switches_the_only_kernel_off_is_warned_of_and_refused",
        oracle=OF_ENGINE,
        edits=(
            (
                "cli/validate.py",
                'if os.environ.get(name, "1") != "1"',
                "if False",
            ),
        ),
    ),
    Mutation(
        trap=142,
        name="the decay of a recipe stays where the iterations change",
        test=SCHEDULE,
        oracle="Bridge's own computation of the steps",
        edits=(("bridge/dataset.py", "        cfg.scheduler.lr_decay_iters = None", "        pass"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=142,
        name="every recipe continues from the checkpoint of any other",
        test=SCHEDULE,
        oracle="the definition",
        edits=(("bridge/dataset.py", "cfg.checkpoint.save = cfg.checkpoint.load =", "cfg.checkpoint.save ="),),
        needs_bridge=True,
    ),
    Mutation(
        trap=142,
        name="a schedule that is overridden is not told",
        test=SCHEDULE,
        oracle="Bridge's own computation of the steps",
        edits=(("validate/rules/steps.py", "if 2 * decay < run:", "if 2 * decay > run:"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=58,
        name="what is missing leaves the exit code at 0",
        test=READS + "test_a_missing_thing_exits_with_1_and_is_the_one_that_is_named[path]",
        oracle="the definition",
        edits=(("cli/validate.py", "(*judgements, *(looks or ()))", "judgements"),),
    ),
    Mutation(
        trap=58,
        name="a part that a metadataset lacks is read as nothing",
        test=READS + "test_a_missing_thing_exits_with_1_and_is_the_one_that_is_named[split]",
        oracle="the definition",
        edits=(
            (
                "validate/looks/data.py",
                "return [missing_split(file, reference.split, splits)]",
                "return []",
            ),
        ),
    ),
    Mutation(
        trap=58,
        name="inner subflavors win over outer ones",
        test="tests/validate/test_leaves.py::"
        "test_leaves_parts_media_stores_and_subflavors_are_those_that_energon_finds",
        oracle="`traverse_metadataset` of Energon",
        edits=(
            (
                "validate/looks/data.py",
                '"subflavors": {**(values.get("subflavors") or {}), **parent.subflavors}',
                '"subflavors": {**parent.subflavors, **(values.get("subflavors") or {})}',
            ),
        ),
    ),
    Mutation(
        trap=58,
        name="nobody looks at the media store",
        test=SHARDS + "[polylithic-lacks media-000000.tar]",
        oracle="our loader on the same data",
        edits=(
            (
                "validate/looks/data.py",
                "    for name, address in leaf.aux.items():\n",
                "    for name, address in ():\n",
            ),
        ),
    ),
    Mutation(
        trap=58,
        name="a shard without its index passes",
        test=SHARDS + "[monolithic-lacks train-000000.tar.idx]",
        oracle="our loader on the same data",
        edits=(("validate/looks/data.py", "    if lost := [", "    if not indices and ["),),
    ),
    Mutation(
        trap=58,
        name="what the template leaves out is a note",
        test=READS + "test_one_conversation_that_the_template_cannot_show_is_an_error_and_one_that_is_too_short_a_note"
        "[template_omits]",
        oracle="the definition",
        edits=(
            (
                "validate/looks/samples.py",
                'each.reason.startswith("template_") or each.reason == "unstable_prefix"',
                'each.reason in ("template_error", "unstable_prefix")',
            ),
        ),
    ),
    Mutation(
        trap=58,
        name="only the first data set of a blend is read",
        test="tests/validate/test_sample_looks.py::"
        "test_a_small_data_set_of_a_blend_is_looked_at_however_rarely_it_is_drawn",
        oracle="the definition",
        edits=(("validate/looks/samples.py", "zip(data.readable[:MOST_LEAVES],", "zip(data.readable[:1],"),),
    ),
    Mutation(
        trap=58,
        name="a look reaches for the network",
        test=READS + "test_a_name_of_the_hub_is_loaded_from_its_cache_without_the_network",
        oracle="a socket that refuses",
        edits=(("validate/run_facts.py", '"HF_HUB_OFFLINE", True)', '"HF_HUB_OFFLINE", False)'),),
    ),
    Mutation(
        trap=112,
        name="experts over tensor ranks are counted where Bridge sets their tensor parallelism to 1",
        test=DRAWN,
        oracle="`initialize_model_parallel` of Megatron-Core",
        edits=(
            (
                "validate/rules/layout.py",
                "view.expert_tensor_parallel or 1 ",
                "view.expert_tensor_parallel or view.tensor_parallel ",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=112,
        name="frozen vision towers are awaited by the gradient reduction",
        test=DRAWN,
        oracle="trained parameters of the model that Bridge's provider builds",
        edits=(("validate/rules/families.py", " or view.vision_frozen or view.dummy_image", " or view.dummy_image"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=112,
        name="full recomputation is refused for layers that have no deepstack features",
        test="tests/conformance/test_memory.py::"
        "test_full_recomputation_is_refused_where_it_loses_the_gradient_of_deepstack_features_and_only_there"
        "[block-1-True]",
        oracle="gradient norm of Bridge's model without recomputation",
        edits=(
            (
                "validate/rules/families.py",
                " or view.vision_frozen or _above_deepstack(view)",
                " or view.vision_frozen",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=85,
        name="the class of the processor is not compared",
        test=OF_THE_MODEL + "test_the_processor_of_every_other_family_is_refused_by_what_is_wrong[qwen3_vl]",
        oracle="transformers' processors and configurations",
        edits=(("validate/rules/families.py", "if expected and own not in expected:", "if False:"),),
    ),
    Mutation(
        trap=85,
        name="the sizes of patches and tiles are not compared",
        test=OF_THE_MODEL + "test_another_size_of_tiles_or_patches_is_refused_in_models_of_no_family",
        oracle="transformers' processors and configurations",
        edits=(("validate/run_facts.py", "geometry=model_geometry(vision,", "geometry=model_geometry({},"),),
    ),
    Mutation(
        trap=58,
        name="hybrid context parallelism passes",
        test="tests/validate/test_rules.py::test_a_rule_of_ours_speaks_when_broken_and_is_content_when_fixed",
        oracle="Megatron-Core's schedule",
        edits=(("validate/rules/layout.py", "not view.hybrid_context_parallel,", "True,"),),
    ),
    Mutation(
        trap=58,
        name="Bridge's users are told keys of our YAML",
        test="tests/validate/test_rules.py::test_what_to_change_is_called_as_the_runs_own_source_calls_it",
        oracle="the definition",
        edits=(("validate/run_view.py", 'if self.source == "ours" else', "if self.source else"),),
    ),
    Mutation(
        trap=85,
        name="only the beginning of a data set is looked at",
        test="tests/validate/test_sample_looks.py::"
        "test_the_conversations_come_from_all_over_the_data_set_and_are_the_same_every_time",
        oracle="the definition",
        edits=(("validate/looks/samples.py", ", sequence=-(-samples // MOST_PLACES) or 1)", ")"),),
    ),
    Mutation(
        trap=85,
        name="a processor without its image half is a note",
        test="tests/validate/test_sample_looks.py::"
        "test_the_conversations_come_from_all_over_the_data_set_and_are_the_same_every_time",
        oracle="the definition",
        edits=(("validate/looks/samples.py", '"family text" in sample.detail', "False"),),
    ),
    Mutation(
        trap=107,
        name="a data set's YAML is opened unread",
        test=IN_DATA + "[part_filter: FILE.py:NAME]",
        oracle="Energon on the same data set",
        edits=(
            (
                "energon/internals.py",
                '    check_data_set(str(getattr(stream, "name", "the data set")), content, values)\n',
                "",
            ),
        ),
    ),
    Mutation(
        trap=107,
        name="only names that end in .py are files of Python",
        test=IN_DATA + "[part_filter: FILE]",
        oracle="Energon on the same data set",
        edits=(("trust.py", "if isinstance(found.get(key), str):", 'if ".py" in str(found.get(key)):'),),
    ),
    Mutation(
        trap=107,
        name="Bridge's own allow list is relied on",
        test=IN_YAML + "[a function of numpy]",
        oracle="Bridge on the same file",
        edits=(("validate/recipes.py", '            _check_names(path, path.read_text(encoding="utf-8"))\n', ""),),
    ),
    Mutation(
        trap=107,
        name="a text becomes a mapping after it was checked",
        test=IN_YAML + "[a target by interpolation]",
        oracle="Bridge on the same file",
        edits=(("validate/recipes.py", 'if "${" in str(found):', "if False:"),),
    ),
    Mutation(
        trap=107,
        name="what a module imported passes for a configuration",
        test="tests/conformance/test_names_in_bridges_yaml.py::"
        "test_a_configuration_may_be_named_where_another_module_imports_it_and_nothing_else_may",
        oracle="the definition",
        edits=(("validate/recipes.py", "and not admits(own):", "and False:"),),
    ),
    Mutation(
        trap=117,
        name="attributes that no class declares are passed over",
        test=PAGE + "test_a_line_of_the_page_is_valid_or_its_new_name_is_told[the specs of 0.4]",
        oracle="the page of Bridge 0.4",
        edits=(("validate/recipes.py", 'elif not name.startswith("_") and', "elif False and"),),
    ),
    Mutation(
        trap=117,
        name="an attribute passes as Bridge's own because some local variable there has its name",
        test=PAGE
        + "test_a_line_of_the_page_is_valid_or_its_new_name_is_told[a slip, a local name in Bridge's sources]",
        oracle="the definition",
        edits=(("validate/recipes.py", "[.\\\"']{re", "\\b{re"),),
    ),
    Mutation(
        trap=117,
        name="the owner in a hub name hides the model",
        test="tests/validate/test_rules.py::"
        "test_only_a_known_model_is_said_to_keep_samples_apart[Qwen/Qwen3-Next-80B-A3B-Instruct-error-ok]",
        oracle="the definition",
        edits=(("validate/run_view.py", '.rstrip("/").rpartition("/")[2]', ""),),
    ),
    Mutation(
        trap=117,
        name="a model is known by its class alone, which Qwen3-Next shares with every GPT",
        test=PAGE + "test_a_recipe_that_opts_out_of_packing_is_refused_if_it_packs[qwen3_next_80b_a3b_sft_config]",
        oracle="Bridge's recipe",
        edits=(("validate/recipes.py", " or _opted_out(container)", ""),),
    ),
    Mutation(
        trap=117,
        name="a model of any name is said to take packs",
        test="tests/validate/test_rules.py::"
        "test_only_a_known_model_is_said_to_keep_samples_apart[foo-not applicable-warning]",
        oracle="the definition",
        edits=(("validate/run_source.py", "is_gpt=not view.family or view.family.startswith(GPTS)", "is_gpt=True"),),
    ),
    Mutation(
        trap=117,
        name="Gemma 3 that sees images is judged as the model of text",
        test="tests/validate/test_rules.py::"
        "test_only_a_known_model_is_said_to_keep_samples_apart[google/gemma-3-27b-it-error-ok]",
        oracle="the definition",
        edits=(("validate/run_view.py", "gemma3(?=(4|12|27)b)|", ""),),
    ),
    Mutation(
        trap=112,
        name="an attribute of one's own stops the run if its name is near to a setting",
        test=PAGE
        + "test_a_line_of_the_page_is_valid_or_its_new_name_is_told[a slip, a local name in Bridge's sources]",
        oracle="the definition",
        edits=(
            (
                "validate/rules/packing.py",
                "in view.unknown_settings if old.rpartition",
                "in view.unknown_settings if new or old.rpartition",
            ),
        ),
    ),
)
