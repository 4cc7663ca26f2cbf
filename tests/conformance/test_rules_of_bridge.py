"""Our verdicts, the rules' sources and the table of families against Bridge: its ``validate()``, its sources.

Every run is judged by Bridge's unmodified ``ConfigContainer.validate()``. Bridge stops at its first complaint and
`all_rules` keeps its order, so our first error must be the one that it names.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bridge_here  # noqa: F401
import pytest
from bridge_sources import BridgeSource, installed_source, path_of_main, sources
from drawn_runs import Tally, drawn, grid, tallied
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_packing.validate import verdict
from energon_packing.validate.family_table import FAMILY_TABLE, FamilyLine, line_of
from energon_packing.validate.recipes import TEXT_MODELS, view_of
from energon_packing.validate.rules.rule import Rule, all_rules, judge, rule_that_bridge_named, violations
from energon_packing.validate.run_view import RunView, installed_version, smallest_world_size
from energon_packing.validate.verdict import BridgeVerdict, bridge_verdict, equivalent_container

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
    view = RunView(**(base | changes))
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


layouts = st.fixed_dictionaries(
    {
        "tensor_parallel": st.sampled_from([1, 2, 3, 4, 8]),
        "context_parallel": st.sampled_from([1, 2, 3, 4, 8]),
        "sequence_parallel": st.booleans(),
        "eval_context_parallel": st.sampled_from([None, 1, 2, 3, 4]),
    }
)


@settings(max_examples=150, deadline=None)
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
    for view in drawn(200, 7):
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
    (expected,) = [known for known in all_rules() if known.id == rule]
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


DRAWN = {"DRAWN_RUNS": "300", "DRAWN_SEED": "20261122"}
RUNS = 4_000
ALONE = 8
"""Runs in which a rule must be the only one violated."""
HERE = RunView(bridge_version=installed_version("megatron-bridge")).bridge_release
ERRORS = [rule.id for rule in all_rules() if rule.severity == "error" and rule.speaks_of(HERE)]
BRIDGES = [rule.id for rule in all_rules() if rule.bridge_says and rule.speaks_of(HERE)]
MEETING = [rule for rule in BRIDGES if not rule.startswith(("bridge/epochs-", "bridge/native-"))]
"""Rules about epochs and Bridge's own packing speak of one kind of data set each: most pairs with them cannot be."""
NEVER_ALONE = {
    "bridge/native-one-packing-mode": "one sample a micro-batch breaks bridge/in-batch-needs-several too",
    **dict.fromkeys(
        (
            "ours/context-parallel-kind",
            "ours/fp8-attention",
            "ours/deterministic-delta-net",
            "ours/dynamic-context-parallel",
            "ours/overlap-needs-one-width",
            "ours/packed-once",
        ),
        "drawn runs have none of the settings; see test_rules",
    ),
    "ours/processor-fits-the-model": "drawn runs have no processor; see test_processor_of_the_model",
    "ours/settings-by-their-names": "drawn runs are no configurations; see test_packing_page_of_bridge",
    "bridge/native-no-average-in-collective": "it breaks two more rules about the average",
}
"""The rule whose place in Bridge's order depends on the data set: ``GPTSFTDatasetConfig`` tests it by itself."""


@pytest.fixture(scope="module")
def counts() -> Tally:
    return tallied(grid(RUNS))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_bridge_and_we_agree_on_every_run_and_name_the_same_rule(counts: Tally) -> None:
    assert counts.disagreements == counts.theirs_alone == counts.unjustified == []
    assert counts.runs >= 5000
    assert counts.accepted >= 1000


def test_no_drawn_run_is_refused_without_a_reason_or_accepted_where_bridge_cannot_build_it() -> None:
    runs, seed = (int(os.environ.get(f"ENERGON_PACKING_{name}", given)) for name, given in DRAWN.items())
    found = tallied(drawn(runs, seed))
    assert found.disagreements == found.theirs_alone == found.unjustified == []
    assert found.built >= runs // 5


@pytest.mark.timeout(1800)
def test_random_runs_are_refused_by_the_rules_that_restate_bridge_exactly_where_bridges_main_branch_refuses_them():
    main = path_of_main()
    if isinstance(main, str):
        pytest.skip(main)
    path = os.pathsep.join([*map(str, main), str(ROOT), os.environ.get("PYTHONPATH", "")])
    program = str(Path(__file__).with_name("drawn_runs.py"))
    done = subprocess.run(
        [sys.executable, program, "400"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Megatron-Bridge 0.7" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_rule_of_severity_error_is_the_only_one_violated_many_times(counts: Tally) -> None:
    few = {rule: counts.alone[rule] for rule in ERRORS if counts.alone[rule] < ALONE}
    assert set(few) == set(NEVER_ALONE) & set(ERRORS), few


# Why two of Bridge's rules cannot be violated by one run.
EXCLUDE_EACH_OTHER = {
    frozenset(("bridge/one-packing-mode", "bridge/pack-size")): "pack rules wait until one mode is on",
    frozenset(("bridge/one-packing-mode", "bridge/one-pack-a-micro-batch")): "as above",
    frozenset(("bridge/one-packing-mode", "bridge/in-batch-needs-several")): "as above",
    frozenset(("bridge/pack-size", "bridge/in-batch-needs-several")): "offline packing; in-batch packing",
    frozenset(("bridge/one-pack-a-micro-batch", "bridge/in-batch-needs-several")): "as above",
    frozenset(
        ("bridge/fixed-boundaries-need-fixed-width", "bridge/graphs-need-fixed-boundaries")
    ): "pad_cu_seqlens on; off",
    frozenset(
        ("bridge/graphs-need-fixed-width", "bridge/local-graphs-of-iterations")
    ): "graphs of an iteration or of Transformer Engine; others",
    frozenset(("bridge/graphs-need-fixed-boundaries", "bridge/local-graphs-of-iterations")): "as above",
    frozenset(("bridge/local-graphs-of-iterations", "bridge/no-nan-check-in-graph")): "as above",
    frozenset(("bridge/hierarchical-sizes-present", "bridge/hierarchical-sizes-product")): "sizes missing; given",
}


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_pair_of_bridges_rules_that_can_meet_does(counts: Tally) -> None:
    pairs = {frozenset(pair) for pair in itertools.combinations(MEETING, 2)}
    missing = {pair for pair in pairs if not counts.pairs[pair]} - set(EXCLUDE_EACH_OTHER)
    assert sorted(sorted(pair) for pair in missing) == []
    assert [sorted(pair) for pair in EXCLUDE_EACH_OTHER if counts.pairs[pair]] == []


def outcome(rule: str, view: RunView) -> str:
    return next(found.outcome for found in judge(view) if found.rule.id == rule)


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("step", ["gpt_step", "vlm_step"])
def test_a_schedule_plan_is_refused_exactly_where_the_step_gives_it_no_boundaries(
    source: BridgeSource, step: str
) -> None:
    (plan,) = source.keywords_of_calls(f"training/{step}.py", "build_schedule_plan")
    view = RunView(bridge_version=source.version, step=step, overlap_moe_expert_parallel_comm=True, **PACKED)
    assert outcome("ours/no-schedule-plan", view) == ("ok" if "packed_seq_params" in plan else "error")


@pytest.mark.parametrize("source", sources())
def test_bridges_own_packing_is_known_exactly_where_its_validate_judges_it(source: BridgeSource) -> None:
    there = "packing_buffer_size" in source.text("training/config.py")
    assert (RunView(bridge_version=source.version).bridge_release >= (0, 7)) == there


def test_every_model_of_bridge_that_can_freeze_an_encoder_is_asked_what_a_pack_without_media_does() -> None:
    source = installed_source()
    assert source is not None
    asked = set()
    for name, fields in source.fields_of_providers().items():
        encoders = any(field.startswith(("freeze_vision", "freeze_audio", "freeze_sound")) for field in fields)
        family = name.removesuffix("ModelProvider").removesuffix("Provider")
        view = RunView(model=TEXT_MODELS.get(name, family), overlap_grad_reduce=True, enable_offline_packing=True)
        assert outcome("ours/packs-without-media", view) == ("error" if encoders else "not applicable"), name
        asked |= {family} if encoders else set()
    assert {"KimiK25VL", "Ministral3", "MiniMaxM3VL", "Ernie45VL", "Qwen2Audio", "NemotronOmni"} <= asked


@pytest.mark.parametrize("source", sources())
def test_the_provider_that_turns_sequence_parallelism_on_is_the_one_that_the_view_knows(source: BridgeSource) -> None:
    text = source.text("models/qwen_vl/qwen3_vl_provider.py")
    dense, experts = text.split("class Qwen3VLMoEModelProvider")
    assert "self.sequence_parallel = True" in experts
    assert "self.sequence_parallel = True" not in dense
    assert RunView(model="Qwen3VLMoE").model_forces_sequence_parallel
    assert not RunView(model="Qwen3VL").model_forces_sequence_parallel


NOT_RAISED = [rule for rule in all_rules() if rule.origin != "bridge"]


def folder_of(package: str) -> Path | None:
    """Where the folder of a package stands, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def has_line(file: Path, says: str) -> bool:
    return file.is_file() and any(says in line for line in file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("rule", NOT_RAISED, ids=lambda rule: rule.id)
def test_a_rule_of_ours_names_lines_that_the_installed_programs_have(rule: Rule) -> None:
    assert rule.sources
    spoken = [line for line in rule.sources if line.speaks_of(HERE)]
    assert spoken or not rule.speaks_of(HERE)
    missing = set[str]()
    for line in rule.sources:
        parts = line.file.split("/")
        depth = 2 if parts[0] == "megatron" else 1
        folder = folder_of(".".join(parts[:depth]))
        if folder is None:
            missing.add(".".join(parts[:depth]))
            continue
        file = folder.joinpath(*parts[depth:])
        assert not line.speaks_of(HERE) or has_line(file, line.says), line
    if missing and len(missing) == len(rule.sources):
        pytest.skip(f"not installed: {', '.join(sorted(missing))}")


@pytest.mark.parametrize("source", sources())
def test_lines_of_bridge_are_there_in_the_versions_that_they_speak_of(source: BridgeSource) -> None:
    release = RunView(bridge_version=source.version).bridge_release
    lines = [line for rule in all_rules() for line in rule.sources if line.file.startswith("megatron/bridge/")]
    assert len(lines) >= 15
    for line in lines:
        file = source.folder / line.file.removeprefix("megatron/bridge/")
        assert not line.speaks_of(release) or has_line(file, line.says), line


@pytest.mark.parametrize("source", sources())
def test_what_validate_says_is_in_the_source_of_the_versions_that_have_the_rule(source: BridgeSource) -> None:
    release = RunView(bridge_version=source.version).bridge_release
    files = ("training/config.py", "data/builders/energon.py", "utils/cuda_graph.py", "data/packing/config.py")
    text = "".join(" ".join(source.text(file).replace('"\n', "").split()) for file in files)
    for rule in all_rules():
        if rule.since > (0, 6):
            assert all((part in text) == rule.speaks_of(release) for part in rule.bridge_says), rule.id


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("source", sources())
@pytest.mark.parametrize("line", FAMILY_TABLE, ids=lambda line: f"{line.prefix}-{line.since[0]}.{line.since[1]}")
def test_a_line_holds_in_the_versions_that_it_speaks_of_and_in_no_other(source: BridgeSource, line: FamilyLine) -> None:
    text = source.text(line.source)
    fits = all(part in text for part in line.holds) and not any(part in text for part in line.lacks)
    assert fits == (line_of(line.prefix, source.release) is line)


@pytest.mark.parametrize("source", sources())
def test_every_family_of_the_table_has_a_provider_by_whose_name_a_run_finds_it(source: BridgeSource) -> None:
    text = " ".join(path.read_text(encoding="utf-8") for path in (source.folder / "models").rglob("*.py"))
    classes = {word.split("(")[0].rstrip(":") for word in text.split() if "Provider" in word}
    names = {TEXT_MODELS.get(name, name).lower().replace("_", "") for name in classes}
    for line in FAMILY_TABLE:
        assert any(name.startswith(line.prefix) for name in names), line.name


@pytest.mark.parametrize("line", FAMILY_TABLE, ids=lambda line: f"{line.prefix}-{line.since[0]}.{line.since[1]}")
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("in_batch", [False, True])
def test_a_run_is_refused_for_its_family_exactly_where_the_table_says_no(
    line: FamilyLine, cp: int, in_batch: bool
) -> None:
    view = RunView(
        model=line.prefix,
        bridge_version=f"{line.since[0]}.{line.since[1]}.0",
        context_parallel=cp,
        world_size=cp,
        enable_offline_packing=not in_batch,
        has_offline_packing_specs=not in_batch,
        enable_in_batch_packing=in_batch,
        micro_batch_size=1 + in_batch,
        global_batch_size=2,
        eval_global_batch_size=2,
    )
    found = {judgement.rule.id for judgement in violations(view)}
    expected = set[str]()
    if not line.packed:
        expected = {"ours/family-takes-packs"}
    elif cp > 1 and not line.context_parallel:
        expected = {"ours/family-context-parallel"}
    assert found == expected


@pytest.mark.parametrize(
    ("module", "provider", "refused"),
    [
        ("gemma.gemma4_provider", "Gemma4ModelProvider", []),
        ("gemma.gemma4_provider", "Gemma4DenseProvider", []),
        ("gemma_vl.gemma4_vl_provider", "Gemma4VLModelProvider", ["ours/family-takes-packs"]),
        ("gemma_vl.gemma4_vl_provider", "Gemma4DenseVLProvider", ["ours/family-takes-packs"]),
    ],
)
def test_gemma_4_takes_packs_as_a_model_of_text_where_its_widest_heads_have_a_kernel(
    module: str, provider: str, refused: list[str]
) -> None:
    container = equivalent_container(consistent(dataset_kind="gpt_sft", **PACKED))
    container.model = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), provider)(seq_length=96)
    view = view_of(container, world_size=1)
    assert view.head_dim == 512
    assert [found.rule.id for found in violations(view.changed(calculate_per_token_loss=True))] == refused
    wide = view.changed(calculate_per_token_loss=True, context_parallel=2, world_size=2)
    assert "ours/attention-kernel" in [found.rule.id for found in violations(wide)]


def test_the_heads_of_mla_are_as_wide_as_its_keys_and_values() -> None:
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    container = equivalent_container(consistent(dataset_kind="gpt_sft", **PACKED))
    container.model = MLAModelProvider(
        num_layers=2, hidden_size=512, num_attention_heads=8, multi_latent_attention=True
    )
    view = view_of(container, world_size=1)
    assert "self.config.qk_head_dim + self.config.qk_pos_emb_head_dim" in inspect.getsource(MLASelfAttention.__mro__[1])
    assert (view.head_dim, view.value_dim) == (192, 128)


@pytest.mark.parametrize("name", ["flash", "auto"])
def test_a_backend_that_is_a_text_is_warned_of_because_megatron_core_ignores_it(name, monkeypatch) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    for variable in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.delenv(variable, raising=False)
    container = equivalent_container(consistent(dataset_kind="gpt_sft", **PACKED))
    for backend, ignored in ((name, True), (AttnBackend[name], False)):
        container.model.attention_backend = backend
        view = view_of(container, world_size=1)
        settings = SimpleNamespace(attention_backend=backend, flash_attention_version=None)
        LanguageModule._set_attention_backend(SimpleNamespace(config=settings))
        assert ("NVTE_FLASH_ATTN" not in os.environ) == ignored
        assert outcome("ours/kernel-choice", view) == ("warning" if ignored and name != "auto" else "ok")
        assert view.attention_backend == (None if ignored else name)
    for variable in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):  # what Megatron-Core set
        os.environ.pop(variable, None)


def test_the_page_shows_the_table_that_the_rules_read() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("<!-- made from energon_packing/validate/family_table.py -->\n")
    _, _, *rows = rest.partition("<!-- end -->")[0].strip().splitlines()
    expected = []
    for line in FAMILY_TABLE:
        said = " | ".join("yes" if yes else "no" for yes in (line.packed, line.context_parallel))
        reason = f": {line.why}" if line.why else ""
        expected.append(f"| {line.name} | {line.since[0]}.{line.since[1]} | {said} | `{line.source}`{reason} |")
    assert rows == expected


@pytest.mark.parametrize("source", sources())
def test_of_the_listed_families_that_see_qwen3_5_vl_alone_trains_several_predicted_tokens(source: BridgeSource) -> None:
    """Others give their language model embeddings only, or build no such layers."""
    for line in FAMILY_TABLE:
        view = RunView(model=line.prefix, bridge_version=source.version, mtp_num_layers=1, enable_offline_packing=True)
        if line.packed and line_of(line.prefix, source.release) is line and not view.goes_through_gpt_step:
            refused = "ours/no-multi-token-prediction" in {judgement.rule.id for judgement in violations(view)}
            without_tokens = "input_ids=None,\n" in source.text(line.source)
            without_layers = line.name == "Qwen3-VL" and "mtp" not in source.text("models/qwen_vl/qwen3_vl_provider.py")
            assert refused == (without_tokens or without_layers) == (line.name != "Qwen3.5-VL"), line.name


def test_a_family_that_is_not_in_the_table_is_not_judged() -> None:
    assert line_of("nosuchmodel", (0, 6)) is None
    assert line_of("glm45air", (0, 6)) is None  # not GLM-4.5V
