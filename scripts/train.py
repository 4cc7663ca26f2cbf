"""The training program that the launchers in scripts/launch start once per GPU.

    torchrun --nproc-per-node 8 scripts/train.py bridge_configs.qwen3_vl:qwen3_vl_8b_sft train.train_iters=2000
    torchrun --nproc-per-node 8 scripts/train.py checkpoints/iter_0000100/run_config.yaml

Reads a Bridge configuration, applies the overrides, checks it against our rules for the GPUs of this run, and passes it
to Megatron-Bridge's `pretrain` or `finetune` with the forward step for packed rows. A mistake ends it with one sentence
and exit code 2, a violated rule with exit code 1, both before any GPU is used.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # `support`


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("overrides", metavar="[SECTION.KEY=VALUE]...", nargs=-1)
@click.option("--data", metavar="DIR", help="Data set; the same as dataset.path=DIR.")
@click.option(
    "--step", metavar="MODULE:FUNCTION", help="Forward step. By default that for the packed rows of the data set."
)
@click.option(
    "--mode",
    type=click.Choice(["auto", "pretrain", "finetune"]),
    default="auto",
    show_default=True,
    help="auto finetunes if checkpoint.pretrained_checkpoint is set, else pretrains.",
)
@click.option("--check", is_flag=True, help="Check the configuration, give the step one batch and no model, and stop.")
@click.option("--cpu", is_flag=True, help="Run a tiny model on the CPU over gloo (docs/correctness.md).")
@click.option(
    "--trust", is_flag=True, help="Let code run that the YAML of RUN or of the data names (docs/security.md)."
)
def main(
    run: str,
    overrides: tuple[str, ...],
    data: str | None,
    step: str | None,
    mode: str,
    check: bool,
    cpu: bool,
    trust: bool,
) -> None:
    """Trains RUN on packed rows.

    RUN is a recipe module:function or the run_config.yaml that Bridge writes; SECTION.KEY=VALUE are Bridge's overrides.
    """
    from energon_packing.errors import UserError
    from energon_packing.trust import trusting

    try:
        with trusting(trust):
            violated = _train(run, (*overrides, *([f"dataset.path={data}"] if data else [])), step, mode, check, cpu)
    except UserError as error:
        _tell([str(error)])
        raise SystemExit(2) from None
    _tell(violated)
    raise SystemExit(1 if violated else 0)


def _tell(errors: Sequence[str]) -> None:
    """Prints the errors of the first rank that has any, with its number; under torchrun, whose store all ranks reach,
    the others stay silent, because most errors are those of every rank."""
    if not errors:
        return
    rank, alone = os.environ.get("RANK", "0"), _world_size() == 1
    if not alone and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        import torch

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with contextlib.suppress(torch.distributed.DistError):  # the launcher is gone
            store = torch.distributed.TCPStore(*place, is_master=False, timeout=timedelta(seconds=5))
            # A restarted run has its own errors.
            if store.add(f"energon_packing/errors/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) > 1:
                return
    click.echo("\n".join(f"Error{'' if alone else f' (rank {rank})'}: {line}" for line in errors), err=True)


def _train(run: str, overrides: tuple[str, ...], step: str | None, mode: str, check: bool, cpu: bool) -> list[str]:
    """Trains, or returns the violated rules, one sentence each."""
    from energon_packing.errors import UserError

    if cpu and (step or mode != "auto"):  # before Bridge is imported, which takes ten seconds
        raise UserError("--cpu trains only with the packed forward step; leave --step and --mode out.")
    from support.bridge_cpu import stand_ins

    if not cpu and not check and stand_ins.needed():
        raise UserError("This machine has no GPU with Transformer Engine; --cpu runs a tiny model on the CPU.")
    if cpu:
        stand_ins.install()
    config = configuration(run, overrides)
    weights = config.checkpoint.pretrained_checkpoint
    if weights and "://" not in weights and not Path(weights).exists():  # where Bridge ends with a traceback
        raise UserError(
            f"checkpoint.pretrained_checkpoint is {weights}, which does not exist; download or import the weights "
            "there, or name another folder (docs/bridge.md)."
        )
    finetunes = mode == "finetune" or (mode == "auto" and bool(weights))
    forward_step = step_of(config, step, finetunes)
    violated = broken_rules(config, step or forward_step.__module__)
    if check and hasattr(config.dataset, "check_run"):
        try:
            config.dataset.check_run(config)  # what Bridge's validate() asks a data set of ours
        except UserError as error:
            violated.append(str(error))
    if violated or check:
        if not violated and os.environ.get("RANK", "0") == "0":
            click.echo(f"{run}: every rule holds for {_world_size()} ranks")
            if hasattr(config.dataset, "run_config"):
                from support.bridge_cpu import one_batch

                click.echo(f"{run}: {one_batch.feed(config, forward_step, step or 'its step')}")
            else:
                click.echo(f"{run}: the data set is Bridge's own; no batch was read")
        return violated
    if cpu:
        _on_the_cpu(config, forward_step)
        return []
    # Imported here, because both need NVIDIA's resiliency extension.
    if finetunes:
        from megatron.bridge.training.finetune import finetune as train
    else:
        from megatron.bridge.training.pretrain import pretrain as train
    from energon_packing.bridge.metrics import PackingMetrics

    try:
        train(config, forward_step, callbacks=[PackingMetrics()])
    except SystemExit as ended:
        if ended.code is None:  # of its own endings, by a signal or ``train.exit_interval``, the code is a number
            raise UserError("Megatron-Bridge ended the run without an error; its last line above says why.") from ended
        raise
    return []


def configuration(run: str, overrides: tuple[str, ...]) -> Any:
    """Returns Bridge's ``ConfigContainer`` from a recipe or a YAML file, with overrides applied.

    Raises:
        UserError: it cannot be read, or an override names no existing setting.
    """
    from energon_packing.errors import ConfigError
    from energon_packing.validate.run_source import ContainerRun, run_source

    sys.path.insert(0, str(ROOT))  # recipes of the checkout: bridge_configs.MODULE:FUNCTION
    source = run_source((run,), overrides=overrides)
    if not isinstance(source, ContainerRun):
        if not Path(run).exists():
            raise ConfigError(f"There is no file {run}; name a recipe module:function or Bridge's run_config.yaml.")
        raise ConfigError(
            f"{run} is {source.kind}, which contains no model; name a recipe module:function or Bridge's "
            "run_config.yaml."
        )
    return source.container


def broken_rules(config: Any, step: str) -> list[str]:
    """Returns what our rules say about the run on its ranks, one sentence per violated rule; prints their warnings."""
    from energon_packing.validate.recipes import view_of
    from energon_packing.validate.rules.rule import judge

    broken = []
    for one in judge(view_of(config, world_size=_world_size(), step=step.partition(":")[0])):
        if one.finding is None:
            continue
        sentence = f"{one.rule.id}: {one.finding.why}; {one.finding.fix}"
        if one.outcome == "error":
            broken.append(sentence)
        elif one.outcome == "warning" and os.environ.get("RANK", "0") == "0":
            click.echo(f"Warning: {sentence}", err=True)
    return broken


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def step_of(config: Any, step: str | None, finetunes: bool) -> Any:
    """Returns the forward step that is named, or the one for the rows of the data set.

    Raises:
        ConfigError: there is no function of that name.
    """
    from energon_packing.errors import ConfigError

    if step is None:
        if hasattr(config.dataset, "make_step"):
            return config.dataset.make_step(finetunes)
        step = "energon_packing.bridge.step:forward_step"
    module, _, name = step.partition(":")
    if module == "energon_packing.bridge.step" and hasattr(config.dataset, "make_step"):
        raise ConfigError(f"--step {step} trains on conversations; leave --step out for this data set.")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--step {step} is not a function: {error}.") from error
    if isinstance(found, type):
        raise ConfigError(
            f"--step {step} is a class, of which Bridge needs an instance; leave --step out, or name a function."
        )
    return found


def _on_the_cpu(config: Any, forward_step: Any) -> None:
    from support import wan_on_cpu
    from support.bridge_cpu import training_run

    from energon_packing.bridge.metrics import PackingMetrics
    from energon_packing.cli.terminal import counted

    first = os.environ.get("RANK", "0") == "0"

    def told(report: Any) -> None:
        if first:
            click.echo(f"step {report.step}: loss {report.loss:.4f}")

    with wan_on_cpu.Replaced() as replaced, training_run.process_groups():
        if hasattr(config.model, "patch_spatial"):
            wan_on_cpu.install(replaced)
            wan_on_cpu.compute_in_float32(replaced)
        result = training_run.run(config, forward_step=forward_step, on_step=told, callbacks=[PackingMetrics()])
    if first:
        click.echo(f"trained {counted(len(result.steps), 'step')} on {counted(_world_size(), 'rank')}")
        if not result.steps:
            click.echo(
                f"train.train_iters is {config.train.train_iters}: the checkpoint has all of these steps already"
            )


if __name__ == "__main__":
    main()
