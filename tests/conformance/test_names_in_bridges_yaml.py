"""`validate` of a Bridge YAML runs nothing that the file names, whatever Bridge's allow list lets through.

The oracle is a file that the code writes: Bridge itself, given the same YAML, runs it.
"""

import contextlib
import shlex
import sys

import bridge_here  # noqa: F401
import pytest
import yaml
from click.testing import CliRunner
from support.bridge_cpu import stand_ins, tiny_models, training_run

from energon_packing.cli.main import cli
from energon_packing.demo import processor_path
from energon_packing.errors import ConfigError
from energon_packing.trust import mappings_in, trusting
from energon_packing.validate.recipes import _is_configuration, container_of_file


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What Bridge writes beside a checkpoint of one of our runs, as plain values."""
    stand_ins.install()
    from energon_packing.bridge import PackedEnergonDatasetConfig

    processor = str(processor_path("qwen3_vl"))
    model = tiny_models.shipped_provider("qwen3_vl", processor=processor, seq_length=256)
    dataset = PackedEnergonDatasetConfig(path="data", processor=processor, seq_length=256)
    container = training_run.make_config(model, dataset, steps=2)
    file = tmp_path_factory.mktemp("bridge") / "run_config.yaml"
    container.to_yaml(str(file))
    return yaml.safe_load(file.read_text())


def runstring(code):
    return {"_target_": "numpy.testing.runstring", "astr": code, "dict": {}}


def interpolated(code):
    """A mapping that OmegaConf makes of a text, which has no key ``_target_`` before."""
    return {"code": code, "x": "${oc.create:{_target_: numpy.testing.runstring, astr: ${logger.more.code}, dict: {}}}"}


RUN = {
    "a function of numpy": runstring,
    "a function of a module that torch imports": lambda code: {
        "_target_": "torch.os.system",
        "_args_": [f"{sys.executable} -c {shlex.quote(code)}"],
    },
    "a target by interpolation": interpolated,
    "in a list": lambda code: [[1, runstring(code)]],
    "an argument of a class": lambda code: {
        "_target_": "megatron.bridge.training.config.ProfilingConfig",
        "profile_ranks": runstring(code),
    },
}
"""Name -> the value of a key that its section does not have: Bridge makes it, and leaves it out afterwards."""


@pytest.mark.parametrize("name", RUN)
def test_what_bridge_runs_while_it_reads_a_file_is_refused_by_file_and_line_until_it_is_trusted(
    written, tmp_path, name
):
    marker, file = tmp_path / "ran", tmp_path / "run_config.yaml"
    more = {"more": RUN[name](f"open({str(marker)!r}, 'w').close()")}
    file.write_text(yaml.safe_dump(written | {"logger": written["logger"] | more}))
    with pytest.raises(ConfigError, match=rf"^{file}, line \d+, names .* add --trust to the command"):
        container_of_file(file)
    assert not marker.exists()
    result = CliRunner().invoke(cli, ["validate", str(file), "--no-data", "--no-bridge"])
    assert (result.exit_code, marker.exists()) == (2, False)
    with trusting(), contextlib.suppress(ConfigError):
        container_of_file(file)
    assert marker.exists()


SPECS = "megatron.core.transformer.spec_utils."
LATER = {
    "a layer of any class": ("transformer_layer_spec", {"_target_": f"{SPECS}ModuleSpec", "module": ["os", "system"]}),
    "a function that imports": ("init_method", {"_target_": f"{SPECS}import_module", "_partial_": True}),
    "a function of a package": ("activation_func", {"_target_": "torch.hub.load", "_call_": False}),
    "what a module imported": ("activation_func", {"_target_": "megatron.core.utils.os.system", "_call_": False}),
    "functools.partial": ("init_method", {"_target_": "functools.partial", "_args_": []}),
    "code beside a processor": ("trust_remote_code", True),
    "an encoder of one's own": ("encoder", "my_module:MyEncoder.Inner"),
    "a trusted data set": ("trust", True),
    "a class of the checkpoint's": ("custom_manager_class", "my_module.Manager"),
}
"""What a run would call later, and `validate` may: the section, and its changes."""


@pytest.mark.parametrize("name", LATER)
def test_what_a_run_would_call_later_is_refused_too(written, tmp_path, name):
    key, value = LATER[name]
    values = yaml.safe_load(yaml.safe_dump(written))
    holder = next(part for part in (values["model"], *mappings_in(values)) if key in part)
    holder[key] = value
    file = tmp_path / "run_config.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=rf"^{file}, line \d+, names "):
        container_of_file(file)


def test_what_bridge_writes_is_read_without_a_flag(written, tmp_path):
    file = tmp_path / "run_config.yaml"
    file.write_text(yaml.safe_dump(written))
    assert container_of_file(file).dataset.path == "data"


def test_a_configuration_may_be_named_where_another_module_imports_it_and_nothing_else_may():
    stand_ins.install()
    assert _is_configuration("megatron.core.optimizer.OptimizerConfig", called=True)  # of `optimizer_config`
    assert not _is_configuration("megatron.core.models.gpt.gpt_model.torch.hub.load", called=False)
