"""Our verdicts against the installed Bridge's unmodified ``ConfigContainer.validate()``: the same runs, the same rule.

Bridge stops at its first complaint and `RULES` keeps its order, so our first error must be the one that it names.
``test_rules_grid.py`` does the same on thousands of runs over all axes at once.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.validate import verdict
from energon_packing.validate.container_view import view_of
from energon_packing.validate.rules.registry import RULES, rule_that_bridge_named, violations
from energon_packing.validate.run_view import RunView, installed_version, smallest_world_size
from energon_packing.validate.verdict import BridgeVerdict, bridge_verdict, equivalent_container

if installed_version("megatron-bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

SIZES = [1, 2, 4]
PACKED = {"enable_offline_packing": True, "has_offline_packing_specs": True}


@pytest.fixture(scope="module", autouse=True)
def bridge() -> None:
    verdict.prepare_bridge()


def by_bridge(view: RunView) -> BridgeVerdict:
    answer = bridge_verdict(view)
    assert answer.accepted is not None, answer.message
    return answer


def first_of_ours(view: RunView) -> str | None:
    """The first error of ours that Bridge has a rule for."""
    return next((found.rule.id for found in violations(view) if found.rule.bridge_says), None)


def assert_same_verdict(view: RunView) -> str | None:
    answer, ours = by_bridge(view), first_of_ours(view)
    if answer.accepted:
        assert ours is None, f"we reject with {ours}, Bridge accepts {view}"
        return None
    assert answer.rule is not None, f"Bridge rejects with a message that no rule knows: {answer.message}; {view}"
    assert ours == answer.rule.id, f"Bridge says {answer.message!r}; {view}"
    return ours


def consistent(**changes: Any) -> RunView:
    """A view of one replica or more, whose data set follows the trainer unless the changes say otherwise."""
    layout = {name: changes.get(name, 1) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    replicas = changes.pop("replicas", 1)
    micro = changes.get("micro_batch_size", 1)
    base: dict[str, Any] = {
        "dataset_kind": "energon",
        "dataset_micro_batch_size": micro,
        "world_size": replicas
        * smallest_world_size(**layout, eval_context_parallel=changes.get("eval_context_parallel")),
        "global_batch_size": 2 * 3 * 16 * micro,
        "dataset_seq_length": 96,
        "model_seq_length": changes.get("dataset_seq_length", 96),
    }
    view = RunView.of(**(base | changes))
    return view.changed(packed_sequence_size=view.dataset_seq_length) if view.enable_offline_packing else view


# Each rule about batches and lengths as the only violation, once or more; the pair names kind and rule.
ONLY_VIOLATION = [
    ("bridge/micro-batch-size", {"dataset_micro_batch_size": 2, "eval_micro_batch_size": 2}),
    ("bridge/eval-micro-batch-size", {"eval_micro_batch_size": 2}),
    ("bridge/seq-length-multiple", {"tensor_parallel": 4, "sequence_parallel": True, "dataset_seq_length": 98}),
    ("bridge/seq-length-multiple", {"eval_context_parallel": 4, "dataset_seq_length": 100}),
    ("bridge/model-seq-length", {"dataset_kind": "gpt_sft", "context_parallel": 2, "dataset_seq_length": 98}),
    ("bridge/per-token-loss", {"context_parallel": 2, "calculate_per_token_loss": False}),
    ("bridge/per-token-loss", {"dataset_kind": "gpt_sft", "context_parallel": 2, "calculate_per_token_loss": False}),
    ("bridge/no-average-in-collective", {"context_parallel": 2, "average_in_collective": True}),
    ("bridge/one-pack-a-micro-batch", {"micro_batch_size": 2, **PACKED}),
    ("bridge/one-pack-a-micro-batch", {"dataset_kind": "gpt_sft", "micro_batch_size": 2, **PACKED}),
    ("bridge/in-batch-needs-several", {"enable_in_batch_packing": True}),
    ("bridge/same-seq-length", {"model_seq_length": 128}),
    ("bridge/same-seq-length", {"dataset_kind": "gpt_sft", "model_seq_length": 128}),
]


@pytest.mark.parametrize(("rule", "changes"), ONLY_VIOLATION)
def test_a_run_that_breaks_one_rule_is_rejected_by_bridge_for_that_rule(rule: str, changes: dict[str, Any]) -> None:
    view = consistent(**changes)
    assert [found.rule.id for found in violations(view)] == [rule]
    assert assert_same_verdict(view) == rule


@pytest.mark.parametrize("kind", ["energon", "packed_energon", "gpt_sft"])
@pytest.mark.parametrize("layout", [{}, {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}])
def test_a_good_run_is_accepted_by_both(kind: str, layout: dict[str, Any]) -> None:
    packed = PACKED if kind != "energon" else {}
    assert assert_same_verdict(consistent(dataset_kind=kind, replicas=2, **layout, **packed)) is None


def random_view(rng: random.Random) -> RunView:
    """A run near the border: most settings agree, a few do not."""

    def rarely(usual: Any, *others: Any) -> Any:
        return rng.choice(others) if rng.random() < 0.12 else usual

    kind = rng.choice(["energon", "packed_energon", "gpt_sft"])
    mode = rng.choice(["offline", "in_batch", "none"])
    micro = rarely(2, 1) if mode == "in_batch" else rarely(1, 2, 3)
    layout = {
        "tensor_parallel": rng.choice(SIZES),
        "context_parallel": rng.choice(SIZES),
        "pipeline_parallel": rng.choice([1, 1, 2]),
        "eval_context_parallel": rarely(None, *SIZES),
    }
    smallest = smallest_world_size(**layout)
    length = rarely(192, 190, 196, 200, 216)
    offline = mode == "offline"
    specs = rarely(offline, not offline)
    return RunView.of(
        dataset_kind=kind,
        **layout,
        sequence_parallel=rng.random() < 0.5,
        world_size=rarely(smallest * rng.choice([1, 2]), smallest + 1, max(1, smallest // 2)),
        micro_batch_size=micro,
        global_batch_size=rarely(96 * micro, 94 * micro + 1),
        eval_micro_batch_size=rarely(None, 1, 2),
        eval_global_batch_size=rarely(None, 96, 95),
        dataset_micro_batch_size=None if kind == "gpt_sft" else rarely(micro, 1, 2),
        do_validation=rng.random() < 0.7,
        dataset_seq_length=length,
        model_seq_length=rarely(length, 192, 190, 384),
        enable_offline_packing=offline,
        enable_in_batch_packing=rarely(mode == "in_batch", mode != "in_batch"),
        has_offline_packing_specs=specs,
        packed_sequence_size=length if specs else None,
        pad_cu_seqlens=rarely(False, True),
        pad_to_max_length=rng.random() < 0.5,
        calculate_per_token_loss=rarely(True, False),
        average_in_collective=rarely(False, True),
        cp_comm_type=rarely(None, "p2p", "a2a+p2p"),
        hierarchical_context_parallel_sizes=rarely(None, (2, 1), (2, 2)),
    )


layouts = st.fixed_dictionaries(
    {
        "tensor_parallel": st.sampled_from([1, 2, 3, 4, 8]),
        "context_parallel": st.sampled_from([1, 2, 3, 4, 8]),
        "sequence_parallel": st.booleans(),
        "eval_context_parallel": st.sampled_from([None, 1, 2, 3, 4]),
    }
)


@settings(max_examples=400, deadline=None)
@given(layout=layouts, length=st.integers(1, 400), kind=st.sampled_from(["energon", "packed_energon"]))
def test_the_alignment_multiple_is_bridges_for_any_layout_and_length(
    layout: dict[str, Any], length: int, kind: Any
) -> None:
    view = consistent(dataset_kind=kind, dataset_seq_length=length, global_batch_size=840, **layout)
    rule = assert_same_verdict(view)
    assert (rule == "bridge/seq-length-multiple") == (length % view.multiple != 0)


@pytest.mark.parametrize("impl", ["transformer_engine", "full_iteration"])
@pytest.mark.parametrize("width", [False, True])
@pytest.mark.parametrize("boundaries", [False, True])
def test_graph_rules_are_bridges(impl: str, width: bool, boundaries: bool) -> None:
    view = consistent(**PACKED, cuda_graph_impl=impl, pad_to_max_length=width, pad_cu_seqlens=boundaries)
    ours, answer = first_of_ours(view), by_bridge(view)
    # Where our graph rules hold, the rest of validate() may still miss Transformer Engine on this machine.
    assert ours == (answer.rule.id if answer.rule else None), answer.message


def test_lists_of_communication_types_and_sizes_of_packs_are_judged_alike() -> None:
    layers = consistent(context_parallel=2, num_layers=3, cp_comm_type=("p2p", "p2p"))
    assert assert_same_verdict(layers) == "bridge/comm-type-of-each-layer"
    assert assert_same_verdict(layers.changed(cp_comm_type=("p2p", "p2p", "a2a"))) is None
    size = consistent(**PACKED).changed(packed_sequence_size=0)
    assert assert_same_verdict(size) == "bridge/pack-size"


def test_the_view_of_a_container_gives_the_verdict_of_the_view_that_it_was_made_from() -> None:
    rng = random.Random(7)
    for _ in range(300):
        view = random_view(rng)
        kind = "gpt_sft" if view.dataset_kind == "gpt_sft" else "energon"
        seen = view_of(equivalent_container(view), world_size=view.world_size)
        assert seen.dataset_kind == kind
        assert first_of_ours(seen) == first_of_ours(view)


def test_a_foreign_provider_escapes_the_rules_that_ours_must_obey() -> None:
    """The reason for `packed_energon`: Bridge itself accepts this run when a DatasetProvider feeds it."""
    view = consistent(dataset_kind="packed_energon", context_parallel=2, calculate_per_token_loss=False, **PACKED)
    container = equivalent_container(view)
    container.dataset = _provider(container.dataset)
    with verdict.believed_world_size(view.world_size):
        container.validate()
    assert first_of_ours(view) == "bridge/per-token-loss"
    assert first_of_ours(view_of(container, world_size=view.world_size)) is None


@pytest.mark.parametrize(("rule", "changes"), ONLY_VIOLATION)
def test_bridge_spares_a_foreign_provider_the_rules_that_say_so_and_no_others(
    rule: str, changes: dict[str, Any]
) -> None:
    view = consistent(**changes)
    container = equivalent_container(view)
    provider = _provider(container.dataset)
    for name in ("enable_offline_packing", "offline_packing_specs", "enable_in_batch_packing"):
        setattr(provider, name, getattr(container.dataset, name))
    container.dataset = provider
    message = None
    with verdict.believed_world_size(view.world_size):
        try:
            container.validate()
        except (ValueError, AssertionError) as error:
            message = str(error)
    (expected,) = [known for known in RULES if known.id == rule]
    assert (message is None) == expected.provider_escapes, message
    assert message is None or rule_that_bridge_named(message) == expected


def _provider(dataset: Any) -> Any:
    from megatron.bridge.data.base import DatasetProvider

    @dataclasses.dataclass
    class Foreign(DatasetProvider):
        seq_length: int = dataset.seq_length

        def build_datasets(self, context: Any) -> tuple[Any, Any, Any]:
            raise NotImplementedError

    return Foreign()
