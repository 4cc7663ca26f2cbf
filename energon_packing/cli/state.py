"""`energon-packing state convert`: from the states of an online run to a plan that goes on with it."""

from pathlib import Path
from typing import Any

import click

from energon_packing.cli.options import FILE, PATH, json_option, set_option
from energon_packing.cli.terminal import answer, say, starting
from energon_packing.config import load_config
from energon_packing.errors import UserError

_EXAMPLES = """\b
Examples:
  energon-packing measure data/chats --config run.yaml --out index
  energon-packing state convert ckpt/energon/step_0000100 --index index --config run.yaml --out rest.parquet
  energon-packing state convert 0.pt 1.pt --index index --config run.yaml --out rest.parquet --json
"""

STATE_FILE = "train_dataloader_dprank000.pt"  # of a Bridge checkpoint; ranks that are new take the first rank's state


@click.group(epilog=_EXAMPLES)
def state() -> None:
    """Make the saved state of an online run portable."""


@state.command(epilog=_EXAMPLES)
@click.argument("states", metavar="STATE...", nargs=-1, required=True, type=PATH)
@click.option("--index", required=True, type=PATH, help="Index of the run's data set.")
@click.option("--config", "config_path", metavar="CFG", required=True, type=click.Path(), help="YAML of the run.")
@set_option
@click.option("--out", metavar="PLAN", required=True, type=FILE, help="To write.")
@click.option("--states-out", metavar="DIR", type=PATH, help="Folder for Bridge's new state.")
@click.option("--force", is_flag=True, help="Replace an existing plan and state.")
@json_option
def convert(
    states: tuple[Path, ...],
    index: Path,
    config_path: str,
    overrides: tuple[str, ...],
    out: Path,
    states_out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Make a plan of the samples that an online run has not given yet, for any number of ranks and workers.

    STATE are the states of all data-parallel ranks in their order, or the folder of a Bridge checkpoint that holds
    them. The plan begins with the rest of the running epoch, in new packs; `plan.epochs` whole epochs follow. Every
    sample occurs in the running epoch exactly once, before or after; packs that were in the window are made anew.
    """
    starting(f"Converting {', '.join(map(str, states))}", quiet=as_json)
    import torch

    from energon_packing.cli.plan import check_plan_name, encoder_parts, show_summary
    from energon_packing.energon.loader import build_task_encoder
    from energon_packing.offline.files import replacing
    from energon_packing.offline.index import Index, kind_of
    from energon_packing.offline.loader import plan_fingerprint, planned_state
    from energon_packing.offline.online_state import left_in_epoch, read_states
    from energon_packing.offline.plan import Plan
    from energon_packing.offline.planner import make_plan

    check_plan_name(out)
    if states_out is not None:
        file = states_out / STATE_FILE  # may be the only state of a run
        read = {(given / STATE_FILE if given.is_dir() else given).resolve() for given in states}
        if file.resolve() in read:
            raise UserError(f"--states-out {states_out} holds the states that are converted; name another folder.")
        if file.exists() and not force:
            raise UserError(f"{file} exists already; name another --states-out, or replace it with --force.")
    if (kind := kind_of(Index.open(index).datasets)) != "conversations":
        raise UserError(f"{index} is an index of {kind}; only the state of a run on conversations can be converted.")
    config = load_config(config_path, overrides)
    left = left_in_epoch(read_states(states), config)
    parts = encoder_parts(config, (index,)) | {"splits": (config.data.split,)}
    facts = make_plan((index,), config, out, force=force, left=left, **parts)
    if states_out is not None:
        fingerprint = plan_fingerprint(Plan.open(out), build_task_encoder(config))
        try:
            states_out.mkdir(parents=True, exist_ok=True)
            # As a replica's reader saves it; the number of packs is that from which its ranks count.
            saved = {"packs": 0, "source": planned_state(0, fingerprint)}
            with replacing(states_out / STATE_FILE) as aside:
                torch.save({"dataloader_state_dict": saved}, aside)
        except (OSError, RuntimeError) as error:
            raise UserError(f"--states-out {states_out} cannot be written ({error})") from error
    rest = sum(left.samples.values())
    first = facts.epoch_ends[0] if len(facts.epoch_ends) > facts.epochs else 0  # none if the plan drops them all
    result = {
        "plan": str(out),
        "id": facts.id,
        "from": {"ranks": left.ranks, "workers": left.workers, "packs": left.packs, "epoch": left.epoch, "left": rest},
        "epoch_ends": list(facts.epoch_ends),
        "max_data_parallel": facts.max_data_parallel,
        "drops": dict(facts.drops),
        **facts.summary,
    }

    def show(told: dict[str, Any]) -> None:
        say(
            f"saved by {left.ranks} ranks x {left.workers} workers after {left.packs:,} packs each; {rest:,} samples "
            f"of epoch {left.epoch} are left, in the first {first:,} packs of the plan"
        )
        show_summary(told)

    answer(result, as_json, show, indent=2)
