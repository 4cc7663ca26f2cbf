"""Every recipe in ``bridge_configs/``, of README and of docs/index.md is valid on Bridge's own, and builds its batch.

There is no hub and no GPU: a processor is the small one of the same family that the demo ships.
"""

import ast
import dataclasses
import json
import random
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import bridge_here  # noqa: F401
import pytest
from click.testing import CliRunner
from manual.blocks import read_page
from support import offline_processors
from support.bridge_cpu import tiny_models

from energon_packing import thd
from energon_packing.cli.main import cli
from energon_packing.convert import ConvertConfig, convert
from energon_packing.demo import make_data, processor_path
from energon_packing.energon.loader import build_loader
from energon_packing.validate import recipes
from energon_packing.validate.recipes import SHIPPED
from energon_packing.validate.rules.rule import judge
from energon_packing.validate.run_source import run_source
from energon_packing.validate.verdict import container_verdict

pytestmark = pytest.mark.usefixtures("stand_ins")


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bridge_configs"


def gpus(module):
    """The table of a recipe file, read without importing it (that needs Bridge)."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "GPUS"
    ]
    return ast.literal_eval(table)


NOT_ESTIMATED = ("qwen35_vl", "ministral3", "glm_45v")
"""Modules of recipes for whose layers `validate` estimates no memory."""
WITHOUT_CP = ("qwen25_vl", "glm_45v")
MODULES = ("qwen25_vl", "qwen3_vl", "qwen3", *NOT_ESTIMATED)
RECIPES = [(module, name, size) for module in MODULES for name, size in gpus(module).items()]


@pytest.fixture(scope="module")
def model_configs(tmp_path_factory):
    """The shipped configurations, and GLM-4.5V by the defaults of transformers, with what Bridge asks for beside them
    (``GLM45VModelProvider`` has the values)."""
    import transformers

    folder = tmp_path_factory.mktemp("models") / "hf"
    shutil.copytree(SHIPPED, folder)
    values = transformers.AutoConfig.for_model("glm4v_moe").to_dict()
    values |= {"architectures": ["Glm4vMoeForConditionalGeneration"], "dtype": "bfloat16"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
    values["text_config"] |= {"head_dim": 128, "use_qk_norm": False, "dtype": "bfloat16", "rope_parameters": rope}
    (folder / "GLM-4.5V").mkdir()
    (folder / "GLM-4.5V" / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(autouse=True)
def training_machine(tmp_path, monkeypatch, model_configs):
    """A folder with the checkpoints that adapters are trained on top of; recipes are importable from the checkout."""
    for model in model_configs.iterdir():
        (tmp_path / "checkpoints" / model.name).mkdir(parents=True)
    (tmp_path / "configs").symlink_to(model_configs)
    monkeypatch.setattr(recipes, "SHIPPED", model_configs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))


def step_of(name):
    with_experts = "_a" in name or name.startswith("glm")
    return "gpt_step" if name.startswith("qwen3_8b") else ("vlm_step", "energon_packing.bridge.step")[with_experts]


def validate(*arguments):
    """Without a look at data: what is shipped names data sets that a reader has yet to make."""
    result = CliRunner().invoke(cli, ["validate", *arguments, "--no-data", "--json"])
    return result.exit_code, json.loads(result.stdout)


def speaking(answer):
    return {rule["rule"]: rule["verdict"] for rule in answer["rules"] if rule["verdict"] in ("error", "warning")}


WITHOUT_WEIGHTS = {"ours/initial-weights": "warning"}


@pytest.mark.parametrize(("module", "name", "size"), RECIPES)
def test_every_recipe_is_valid_and_bridge_accepts_it(module, name, size):
    code, answer = validate(f"bridge_configs.{module}:{name}", "--world-size", str(size), "--step", step_of(name))
    assert speaking(answer) == {}
    assert answer["bridge"]["message"] is None
    assert (code, answer["bridge"]["verdict"]) == (0, "accepts")
    assert answer["resolved"]["packing"] == "online"
    memory = answer["resolved"]["gpu_memory_bytes"]
    assert memory is None if module in NOT_ESTIMATED else 16e9 < memory["total"] <= 80e9
    assert answer["resolved"]["micro_batches_per_step"] >= 1
    assert answer["resolved"]["context_parallel"] == 1 or module not in WITHOUT_CP


@pytest.mark.parametrize(("module", "name", "size"), [recipe for recipe in RECIPES if recipe[0] in NOT_ESTIMATED])
def test_what_a_rank_always_holds_takes_some_half_of_a_gpu_where_memory_is_not_estimated(module, name, size):
    """Weights, gradients and optimizer at most, of the parameters of the Hugging Face class."""
    import torch
    import transformers

    container = run_source((f"bridge_configs.{module}:{name}",), world_size=size).container
    model, where = container.model, Path(container.checkpoint.pretrained_checkpoint).name
    values = json.loads((recipes.SHIPPED / where / "config.json").read_text())
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        parameters = dict(getattr(transformers, config.architectures[0])(config).named_parameters())
    tensor, stages = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    layout = model.pipeline_model_parallel_layout or [["decoder"] * (model.num_layers // stages)]
    layers = max(part.count("decoder") for part in layout)  # of the fullest stage, as if it were the first one, too
    dense = experts = 0
    for parameter, weight in parameters.items():
        if "visual" in parameter or "vision" in parameter or "projector" in parameter:
            dense += weight.numel()
        elif ".layers." not in parameter:
            if stages > 1 and "lm_head" in parameter:  # on the last stage, which has no embedding and no vision encoder
                continue
            dense += weight.numel() / tensor
        elif ".experts." in parameter:
            experts += weight.numel() / model.num_layers * layers / model.expert_model_parallel_size
        else:
            dense += weight.numel() / model.num_layers * layers / tensor
    trained = container.peft is None
    held = 2 * (dense + experts) + trained * 4 * (dense + experts)
    replicas = size // (tensor * stages)
    held += trained * 12 * (dense / replicas + experts * model.expert_model_parallel_size / (size / stages))
    print(f"{name}: {held / 1e9:.1f} GB")
    assert 5e9 < held < 85e9 / 2
    assert (model.recompute_granularity, model.recompute_num_layers) == ("full", 1)
    assert container.dataset.packing.max_patches_per_pack == 8192


def rates(container):
    """The learning rate of each step, by Megatron-Core's scheduler with the numbers of Bridge's ``validate()``."""
    from megatron.bridge.training.optim import _get_scheduler

    groups = [{"max_lr": container.optimizer.lr, "min_lr": container.optimizer.min_lr}]
    container._calculate_scheduler_steps()
    scheduler = _get_scheduler(container.optimizer, container.scheduler, SimpleNamespace(param_groups=groups))
    found = []
    for _ in range(container.train.train_iters):
        scheduler.step(container.train.global_batch_size)
        found.append(groups[0]["lr"])
    return found


@pytest.mark.parametrize("overridden", [None, 5000])
@pytest.mark.parametrize(("module", "name", "size"), RECIPES)
def test_every_recipe_trains_over_the_whole_run_from_weights_and_in_a_directory_of_its_own(
    module, name, size, overridden
):
    sets = () if overridden is None else (f"train.train_iters={overridden}",)
    container = run_source((f"bridge_configs.{module}:{name}",), overrides=sets, world_size=size).container
    found, lowest, highest = rates(container), container.optimizer.min_lr, container.optimizer.lr
    assert len(found) == (overridden or 2000)
    assert found.index(max(found)) < len(found) / 10
    assert max(found) == pytest.approx(highest)
    assert found[len(found) // 2] > (lowest + highest) / 2.5  # a cosine is half way down; its warm-up is short
    assert found[-1] == pytest.approx(lowest, abs=highest / 1000)
    kept = container.checkpoint
    assert kept.save == kept.load == f"nemo_experiments/{name}/checkpoints"
    assert container.logger.tensorboard_dir == f"nemo_experiments/{name}/tb_logs"
    assert Path(kept.pretrained_checkpoint).is_dir()  # one of the shipped configurations' names


@pytest.mark.parametrize(
    ("recipe", "iterations", "said"),
    [
        ("megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_sft_config", 2000, "98% of the steps"),
        ("megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_peft_config", 2000, "after 1% of the decay"),
        ("bridge_configs.qwen3_vl:qwen3_vl_8b_peft", 300, "lr_warmup_iters is 200"),
    ],
)
def test_a_schedule_that_does_not_fit_the_iterations_is_told(recipe, iterations, said):
    _, answer = validate(recipe, "--no-bridge", "--set", f"train.train_iters={iterations}")
    (why,) = [rule["why"] for rule in answer["rules"] if rule["rule"] == "ours/decay-over-the-run"]
    assert said in why


@pytest.mark.parametrize("module", [*MODULES, "wan"])
def test_the_command_in_the_first_lines_of_a_recipe_file_runs_in_a_fresh_checkout(module, tmp_path, monkeypatch):
    for shipped in ("bridge_configs", "energon_packing"):
        (tmp_path / shipped).symlink_to(ROOT / shipped)
    monkeypatch.chdir(tmp_path)
    text = ast.get_docstring(ast.parse((FOLDER / f"{module}.py").read_text()))
    (command,) = [line for line in text.replace("\\\n", "").splitlines() if line.startswith("    energon-packing ")]
    done = CliRunner().invoke(cli, shlex.split(command)[1:])
    assert (done.exit_code, "validate() accepts" in done.stdout) == (0, True), done.output


def test_what_a_recipe_of_the_current_folder_puts_on_the_path_is_there_when_its_model_is_finalised(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    for name in ("here_late.py", "lib/lib_late.py"):
        (tmp_path / name).touch()
    (tmp_path / "own_recipe.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'lib')!r})\n"
        f"from bridge_configs.{RECIPES[0][0]} import {RECIPES[0][1]}\n"
        "def sft_config():\n"
        f"    config = {RECIPES[0][1]}()\n"
        "    class Late(type(config.model)):\n"
        "        def finalize(self):\n"
        "            import here_late, lib_late\n"
        "            self.moe_token_dispatcher_type = 'came'\n"
        "    config.model.__class__ = Late\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(str(ROOT))
    container = run_source(("own_recipe:sft_config",), world_size=RECIPES[0][2]).container
    assert recipes.finalised(container.model).moe_token_dispatcher_type == "came"


@pytest.mark.parametrize(("module", "name", "size"), {recipe[0]: recipe for recipe in RECIPES}.values())
def test_every_recipe_takes_the_processor_of_its_family_and_refuses_that_of_the_neighbour(module, name, size):
    for family in ("qwen2_5_vl", "qwen3_vl", FAMILIES[module]):
        source = run_source(
            (f"bridge_configs.{module}:{name}",),
            overrides=(f"dataset.processor={processor_of(family)}",),
            world_size=size,
        )
        (judged,) = [found for found in judge(source.view()) if found.rule.id == "ours/processor-fits-the-model"]
        if module == "qwen3":  # a model of text states nothing to compare
            assert judged.outcome == "not applicable"
        else:
            same = (FAMILIES[module], *["qwen3_vl"] * (module == "qwen35_vl"))  # whose patches are of one form
            assert judged.outcome == ("ok" if family in same else "error"), family


@pytest.mark.parametrize(
    ("recipe", "memory", "verdict"),
    [
        ("bridge_configs.qwen3:qwen3_8b_sft", "36", "warning"),
        ("bridge_configs.qwen3:qwen3_8b_sft", "38", "ok"),
        ("megatron.bridge.recipes.qwen_vl:qwen3_vl_30b_a3b_sft_config", "80", "warning"),
        ("bridge_configs.wan:wan_1_3b_text2video", "1", "not applicable"),
    ],
)
def test_a_run_that_does_not_fit_its_gpus_is_warned_about_if_its_model_is_known(recipe, memory, verdict):
    answer = validate(recipe, "--world-size", "8", "--gpu-memory", memory, "--no-bridge")[1]
    (found,) = [rule for rule in answer["rules"] if rule["rule"] == "ours/gpu-memory"]
    assert found["verdict"] == verdict
    assert (answer["resolved"]["gpu_memory_bytes"] is None) == (verdict == "not applicable")


@pytest.mark.parametrize(
    ("setting", "warned"),
    [
        ("pretrained_checkpoint=checkpoints/Qwen3-8B", {}),
        ("load=checkpoints/Qwen3-8B", {}),
        ("load=checkpoints/not-there-yet", WITHOUT_WEIGHTS),
    ],
)
def test_a_run_that_names_weights_or_continues_is_not_warned_about_random_ones(setting, warned):
    recipe = ("bridge_configs.qwen3:qwen3_8b_sft", "--world-size", "8", "--step", "gpt_step", "--no-bridge")
    sets = ("--set", "checkpoint.pretrained_checkpoint=null", "--set", f"checkpoint.{setting}")
    assert speaking(validate(*recipe, *sets)[1]) == warned


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen2.5-VL-3B-Instruct", 3.75e9),
        ("Qwen2.5-VL-7B-Instruct", 8.29e9),
        ("Qwen2.5-VL-32B-Instruct", 33.5e9),
        ("Qwen2.5-VL-72B-Instruct", 73.4e9),
        ("Qwen3-VL-8B-Instruct", 8.77e9),
        ("Qwen3-VL-30B-A3B-Instruct", 31.1e9),
        ("Qwen3-VL-235B-A22B-Instruct", 235.7e9),
        ("Qwen3-8B", 8.19e9),
        ("Qwen3.5-9B", 9.41e9),
        ("Qwen3.5-27B", 27.4e9),
        ("Qwen3.5-35B-A3B", 35.1e9),
        ("Ministral-3-8B-Instruct-2512", 8.9e9),
    ],
)
def test_a_shipped_configuration_has_the_published_number_of_parameters(name, parameters):
    """A wrong width or depth would show; built on torch's meta device, in the Hugging Face class."""
    import torch
    import transformers

    values = json.loads((SHIPPED / name / "config.json").read_text())
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        model = kind(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.005)


BROKEN = [
    (
        "bridge_configs.qwen25_vl:qwen25_vl_7b_sft",
        "16",
        ["model.context_parallel_size=2"],
        "ours/family-context-parallel",
    ),
    ("bridge_configs.qwen3_vl:qwen3_vl_8b_sft", "8", ["train.micro_batch_size=2"], "bridge/one-pack-a-micro-batch"),
    ("bridge_configs.qwen3_vl:qwen3_vl_8b_sft", "8", ["model.seq_length=4096"], "bridge/same-seq-length"),
    (
        "megatron.bridge.recipes.qwen_vl:qwen3_vl_235b_a22b_sft_config",
        "32",
        ["model.expert_tensor_parallel_size=4"],
        "core/expert-world-size",
    ),
]


@pytest.mark.parametrize(("recipe", "size", "overrides", "rule"), BROKEN)
def test_a_broken_recipe_is_refused_for_its_rule(recipe, size, overrides, rule):
    sets = [word for override in overrides for word in ("--set", override)]
    code, answer = validate(recipe, "--world-size", size, *sets)
    assert code == 1
    assert any(found.startswith(rule) for found, verdict in speaking(answer).items() if verdict == "error")


def test_the_global_batch_that_keeps_the_tokens_of_an_unpacked_recipe_is_told():
    name = "megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_sft_config"
    code, answer = validate(name, "--world-size", "8", "--tokens-per-sample", "512", "--no-bridge")
    assert code == 0
    assert answer["resolved"]["packing"] == "in_batch"
    # 32 samples of 512 tokens are 16,384: four rows of 4,096, one for each of four replicas.
    assert answer["resolved"]["global_batch_size_in_packs"] == 4


@pytest.fixture
def serialised(tmp_path):
    """A recipe as Bridge writes it beside a checkpoint."""
    source = run_source(("bridge_configs.qwen3_vl:qwen3_vl_8b_sft",))
    source.container.to_yaml(str(tmp_path / "run_config.yaml"))
    return tmp_path / "run_config.yaml"


def test_a_serialised_bridge_configuration_is_judged(serialised):
    code, answer = validate(str(serialised), "--world-size", "8", "--step", "vlm_step")
    assert answer["kind"] == "serialised Bridge configuration"
    assert (code, speaking(answer), answer["bridge"]["verdict"]) == (0, {}, "accepts")
    code, answer = validate(str(serialised), "--world-size", "8", "--step", "qwen3_vl_step")
    assert (code, speaking(answer)) == (1, {"ours/step-reads-packs": "error"})


def reads_of(*sets):
    words = [word for change in sets for word in ("--set", change)]
    recipe = ("bridge_configs.qwen3_vl:qwen3_vl_8b_sft", "--world-size", "8", "--step", "vlm_step", "--no-bridge")
    result = CliRunner().invoke(cli, ["validate", *recipe, "--json", *words])
    return result.exit_code, json.loads(result.stdout)["reads"]


def test_what_a_recipe_reads_is_looked_at_under_bridges_names_and_an_evaluation_needs_its_part(tmp_path):
    source = make_data(tmp_path / "made", conversations=24, seed=4, defects=False)
    for name, split in (("both", {"train": 0.6, "val": 0.4}), ("train", {"train": 1.0})):
        convert(ConvertConfig(sources=(source,), out=tmp_path / name, split=split, workers=0))
    here = (f"dataset.processor={processor_path('qwen3_vl')}", f"dataset.path={tmp_path / 'both'}")
    looks = reads_of(*here)[1]
    assert {look["outcome"] for look in looks} == {"ok"}
    places = {look["at"].partition(":")[0] for look in looks}
    assert places == {
        "dataset.path",
        "dataset.data.split",
        "dataset.validation_split",
        "dataset.processor",
        "dataset.encoder.chat_template",
        "dataset.packing.ledger",
    }
    code, looks = reads_of(here[0], f"dataset.path={tmp_path / 'train'}")
    (wrong,) = [look for look in looks if look["outcome"] == "error"]
    assert (code, wrong["at"]) == (1, "dataset.validation_split: val")
    looks = reads_of(here[0], f"dataset.path={tmp_path / 'train'}", "validation.eval_iters=0")[1]
    assert {look["outcome"] for look in looks} == {"ok"}
    other = f"dataset.validation_path={tmp_path / 'both'}"
    looks = reads_of(here[0], f"dataset.path={tmp_path / 'train'}", other)[1]
    assert {look["outcome"] for look in looks} == {"ok"}
    code, looks = reads_of(*here, "dataset.validation_path=nowhere", "dataset.encoder=my_module:MyEncoder")
    found = {look["at"]: look["outcome"] for look in looks}
    errors = [look["at"] for look in looks if look["outcome"] == "error"]
    assert (code, errors) == (1, ["dataset.validation_path: nowhere"])
    assert found["dataset.encoder: my_module:MyEncoder"] == found[here[1].replace("=", ": ")] == "not looked at"
    code, looks = reads_of("dataset.path=nowhere", "dataset.encoder.chat_template=none.jinja")
    assert code == 1
    assert [look["at"] for look in looks if look["outcome"] == "error"] == [
        "dataset.path: nowhere",
        "dataset.encoder.chat_template: none.jinja",
    ]


def test_a_recipe_as_shipped_names_each_data_set_that_is_not_there_yet(tmp_path):
    shutil.copytree(FOLDER / "data", tmp_path / "bridge_configs" / "data")
    code, looks = reads_of()
    missing = [look["why"].split(" does not exist")[0] for look in looks if look["outcome"] == "error"]
    assert code == 1
    assert missing == [str(tmp_path / "data" / name / "dataset.yaml") for name in ("packed", "packed_more")]


def test_a_data_set_of_bridges_own_is_not_looked_at():
    name = "megatron.bridge.recipes.qwen_vl:qwen3_vl_8b_sft_config"
    result = CliRunner().invoke(cli, ["validate", name, "--world-size", "8", "--no-bridge", "--json"])
    looks = json.loads(result.stdout)["reads"]
    assert (result.exit_code, {look["outcome"] for look in looks}) == (0, {"not looked at"})
    assert "not ours" in looks[0]["why"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no.such.module:recipe", "cannot be imported"),
        ("bridge_configs.qwen3_vl:qwen3_vl_9b_sft", "no function qwen3_vl_9b_sft"),
        ("math:floor", "stops with TypeError"),
        ("locale:getlocale", "expected a ConfigContainer"),
    ],
)
def test_a_recipe_that_cannot_be_used_exits_with_2_and_one_sentence(given, words):
    result = CliRunner().invoke(cli, ["validate", given])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.splitlines()[0] == f"Checking {given} ..."
    assert result.stderr.count("\n") == 2


FAMILIES = {
    **{"qwen25_vl": "qwen2_5_vl", "qwen3_vl": "qwen3_vl", "qwen3": "text"},
    **{"qwen35_vl": "qwen3_5_vl", "ministral3": "ministral3", "glm_45v": "glm4v"},
}
SMALL = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
OFFLINE = {
    "qwen3_5_vl": lambda: offline_processors.qwen3_5_vl(SMALL, SMALL),
    "ministral3": lambda: offline_processors.pixtral(1540, 14, 2),
    "glm4v": lambda: offline_processors.glm4v(SMALL, SMALL),
}


def processor_of(family):
    """The small processor of the demo, or one made here."""
    if family not in OFFLINE:
        return str(processor_path(family))
    folder = Path("processors", family).absolute()
    if not folder.is_dir():
        OFFLINE[family]().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A working folder for vision models and one for text models, with the data that the files name."""
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(1)
    words = ["pack", "row", "token", "image", "loader", "turn", "answer", "window", "batch", "sample"]
    lines = []
    for number in range(200):
        text = " ".join(draw.choices(words, k=draw.randint(5, 400)))
        turns = f'{{"role": "user", "content": "say {number}"}}, {{"role": "assistant", "content": "{text}"}}'
        lines.append(f'{{"id": "{number}", "messages": [{turns}]}}')
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n")
    sources = {"vision": make_data(folder / "made", conversations=40, defects=False), "text": folder / "text.jsonl"}
    for kind, source in sources.items():
        shutil.copytree(FOLDER / "data", folder / kind / "bridge_configs" / "data")
        for name in ("packed", "packed_more"):
            out = folder / kind / "data" / name
            convert(ConvertConfig(sources=(source,), out=out, split={"train": 0.9, "val": 0.1}, workers=0))
    return folder


def first_pack(config):
    """Of a run configuration, read in this process."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, workers=0))
    return next(iter(build_loader(config)))


BUILT = (
    *("25_vl_3b_sft", "25_vl_72b_sft", "3_vl_30b_a3b_sft_long", "3_vl_235b_a22b_sft", "qwen3_8b_sft_long"),
    *("qwen35_vl_27b_sft", "ministral3_8b_sft", "glm_45v_sft"),
)
"""How the names end of one recipe for each layout of ranks."""


@pytest.mark.parametrize(("module", "name", "size"), [recipe for recipe in RECIPES if recipe[1].endswith(BUILT)])
def test_a_recipe_builds_a_sound_batch_at_its_own_alignment(module, name, size, places, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(places / ("text" if module == "qwen3" else "vision"))
    processor = processor_of(FAMILIES[module])
    container = run_source((f"bridge_configs.{module}:{name}",), world_size=size).container
    if container.checkpoint.pretrained_checkpoint:
        Path(container.checkpoint.pretrained_checkpoint).mkdir(parents=True, exist_ok=True)
    verdict = container_verdict(container, world_size=size)  # what pretrain() calls first: it settles the layout
    assert verdict.accepted, verdict.message
    dataset, model = container.dataset, container.model
    sizes = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
    groups = SimpleNamespace(
        **{
            short: SimpleNamespace(size=lambda long=long: getattr(model, f"{long}_model_parallel_size", None) or 1)
            for short, long in sizes.items()
            if short != "cp"
        },
        cp=SimpleNamespace(size=lambda: model.context_parallel_size),
    )
    parallel = dataset.parallel_config(groups)
    dataset.processor = processor
    config = dataset.run_config(parallel)
    batch = first_pack(config).batch

    assert parallel.multiple == thd.alignment_multiple(
        model.tensor_model_parallel_size, model.context_parallel_size, model.sequence_parallel
    )
    assert thd.check_thd(batch, multiple=parallel.multiple) == []
    fixed = model.pipeline_model_parallel_size > 1 or model.expert_model_parallel_size > 1
    assert batch.total_tokens == dataset.seq_length if fixed else batch.total_tokens <= dataset.seq_length
    assert batch.real_tokens > 0.9 * dataset.seq_length
    assert batch.num_samples > 1
    row = batch.to_bridge()
    assert (row["visual_inputs"] is None) == (module == "qwen3")
    if model.context_parallel_size > 1:  # and what each rank sees of it
        parts = [
            thd.slice_for_context_parallel(batch, model.context_parallel_size, rank)
            for rank in range(model.context_parallel_size)
        ]
        assert {part.tokens.shape[1] for part in parts} == {batch.total_tokens // model.context_parallel_size}


PAGES = {"README.md": 4096, "docs/index.md": 8192}  # page -> seq_length


def recipe(page):
    (block,) = [block for block in read_page(ROOT / page).blocks if block.run_by.endswith(Path(__file__).name)]
    return block.text


@pytest.mark.parametrize("page", PAGES)
def test_the_recipe_passes_unmodified_validate_on_two_ranks(page, monkeypatch):
    """Only the hub is replaced: the recipe's model name gives a tiny configuration of the same family."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.config import runtime_config_update

    tokens = tiny_models.SpecialTokens(vision_start=4079, vision_end=4080, image=4082, video=4083)
    tiny = tiny_models.hugging_face_config("qwen3_vl", vocab_size=4096, tokens=tokens, seq_length=4096)
    monkeypatch.setattr(
        AutoBridge, "from_hf_pretrained", staticmethod(lambda *_, **__: AutoBridge.from_hf_config(tiny))
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    scope = {}
    exec(compile(recipe(page), page, "exec"), scope)
    cfg = scope["cfg"]
    runtime_config_update(cfg)  # what Bridge's pretrain() calls first; ends with validate()
    assert cfg.dataset.offline_packing_specs.packed_sequence_size == cfg.model.seq_length == PAGES[page]
    assert cfg.dataset.run_config(cfg.dataset.parallel_config(None)).packing.seq_length == PAGES[page]
