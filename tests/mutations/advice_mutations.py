"""Bugs of advice: memory, units, and who shares what."""

from mutation_table import Mutation

ADVICE = "tests/conformance/test_advice.py::"
MEMORY = "tests/conformance/test_memory.py::"
PROPOSED = ADVICE + "test_what_is_proposed_passes_validate_and_is_faster_than_the_recipe"
ROW = ADVICE + "test_a_row_takes_its_operations_at_the_share_of_the_peak_and_what_its_links_need"
PUBLISHED = ADVICE + "test_published_runs_are_foretold_within_the_errors_that_advice_states"
FILE = "report/advice.py"

ADVICE_TRAPS = {
    277: "what is proposed does not fit a GPU, or its memory is not what a step takes",
    278: "a figure of advice has another unit than its name says",
    279: "advice takes ranks to share what they do not, or nobody to wait",
}

ADVICE_MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        trap=277,
        name="what an estimate leaves out has no room on a GPU",
        test=PROPOSED + "[bridge_configs.qwen25_vl:qwen25_vl_7b_sft]",
        oracle="the estimate of `validate`, and what published runs took beyond it",
        edits=((FILE, "gpus.memory * (1 << 30) - SPARE", "gpus.memory * (1 << 30)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=277,
        name="the gate of a feed-forward part is not kept for its gradient",
        test=MEMORY + "test_the_estimate_is_the_peak_of_torchs_allocator_in_a_step_of_many_layers[text]",
        oracle="torch's allocator",
        edits=(
            (
                "validate/memory.py",
                "whole = attention + 2 * stream + 3 * model.ffn_hidden_size / tensor",
                "whole = attention + 2 * stream + 2 * model.ffn_hidden_size / tensor",
            ),
        ),
        needs_bridge=True,
    ),
    Mutation(
        trap=278,
        name="links are in gigabits",
        test=ROW,
        oracle="the collectives of sequence parallelism, as published",
        edits=((FILE, "return 1e9 * (self.link if", "return 1e9 / 8 * (self.link if"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=278,
        name="GPU hours are hours by the clock",
        test=PROPOSED + "[bridge_configs.qwen25_vl:qwen25_vl_7b_sft]",
        oracle="steps times seconds of a step times GPUs",
        edits=((FILE, "hours = seconds * gpus.count / 3600", "hours = seconds / 3600"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="context-parallel ranks compute the whole row",
        test=ROW,
        oracle="the share of a rank",
        edits=((FILE, "* slower / (tensor * context * peak)", "* slower / (tensor * peak)"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="a ring leaves its node by all network cards",
        test=ADVICE + "test_a_ring_that_leaves_its_node_has_one_network_card_and_a_collective_all_of_its_members",
        oracle="the definition",
        edits=((FILE, "(1 if single else inside)", "inside"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="every replica takes all packs of a global batch",
        test=PUBLISHED,
        oracle="published runs",
        edits=((FILE, "(step + 1) * rows : replicas]", "(step + 1) * rows]"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="stages of a pipeline do not wait for each other",
        test=ADVICE + "test_the_bubble_of_equal_packs_is_that_of_1f1b",
        oracle="(P - 1) / (M + P - 1)",
        edits=((FILE, 'return Layout(self.sizes["PP"],', "return Layout(1,"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="the head is spread over all stages",
        test=ADVICE + "test_the_last_stage_has_the_head_which_the_others_wait_for",
        oracle="the definition",
        edits=((FILE, "forward[:, -1] += seconds[:, 2] / 3", "forward += seconds[:, 2:] / 3 / forward.shape[1]"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="tokens reach all experts inside a node",
        test=ADVICE + "test_tokens_go_to_every_expert_of_theirs_or_once_to_each_node",
        oracle="the ranks of the other node",
        edits=((FILE, "near, away = min(node, ranks) - 1, max(ranks - node, 0)", "near, away = ranks - 1, 0"),),
        needs_bridge=True,
    ),
    Mutation(
        trap=279,
        name="metrics scale nothing",
        test=ADVICE + "test_metrics_of_the_recipe_scale_all_that_is_foretold[2.5-2]",
        oracle="the seconds of the run",
        edits=((FILE, "scale=seconds / foretold)", "scale=1.0)"),),
        needs_bridge=True,
    ),
)
