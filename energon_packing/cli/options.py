"""Options that several commands share, each declared once."""

import os
from collections.abc import Callable, Iterable
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from energon_packing.errors import UserError
from energon_packing.executors.work import EXECUTORS
from energon_packing.trust import trusting


class NewFile(click.Path):
    """A file that a command writes after long work, so its directory is checked before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises `UserError`: its directory does not exist."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no directory {path.parent}.")
        return path


class Named(click.Choice[str]):
    """A choice of names that are asked for when one is given, other than the default, or when help is printed."""

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self._names, self.case_sensitive = names, True

    @cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names."""
        return tuple(self._names())

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value if param is not None and value == param.default else super().convert(value, param, ctx)


PATH = click.Path(path_type=Path)
FILE, NEW_FILE = click.Path(path_type=Path, dir_okay=False), NewFile(path_type=Path, dir_okay=False)
AT_LEAST_0, AT_LEAST_1 = click.IntRange(min=0), click.IntRange(min=1)
Decorator = Callable[[Any], Any]


def together(*options: Decorator) -> Decorator:
    """The options as one decorator, in their order."""
    return lambda function: reduce(lambda decorated, option: option(decorated), reversed(options), function)


defaulted = partial(click.option, show_default=True)  # a `click.option` whose help tells its default
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
trust_option = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, trusts: ctx.with_resource(trusting(trusts)),
    help="Let code run that the YAML of a data set or of Bridge names (docs/security.md).",
)
settable = partial(click.option, "--set", "overrides", metavar="SECTION.KEY=VALUE", multiple=True)
set_option = settable(help="Change a value; may be repeated.")
config_options = together(
    click.option("--config", "config_path", metavar="CFG", type=click.Path(), help="YAML configuration."),
    *(set_option, trust_option),
)
split_option = defaulted("--split", default="train", help="Part of each data set.")
executor_options = together(
    click.option(
        "--workers",
        type=AT_LEAST_0,
        help="Processes; 0 works in this one. Default: one per CPU, at most 8; with Ray, all CPUs of the cluster.",
    ),
    defaulted(
        "--executor",
        type=Named(EXECUTORS.names),
        default="local",
        help="Who works: processes of this machine, or a Ray cluster.",
    ),
    click.option(
        "--address",
        help="Address of a Ray cluster. Default: RAY_ADDRESS, else a cluster on this machine for this command.",
    ),
)
"""The fields of an `ExecutorConfig`."""
rank_options = together(
    click.option(
        "--rank", type=AT_LEAST_0, default=0, help="Number of this one among --world-size such commands, from 0."
    ),
    click.option("--world-size", type=AT_LEAST_1, default=1, help="Number of such commands."),
    click.option("--tasks", type=FILE, help="Do only the shards that this file names, one a line, as --slurm does."),
    click.option("--slurm", type=PATH, help="Do nothing: write a job for Slurm there, of what is missing."),
    click.option("--shards-per-task", type=AT_LEAST_1, help="Of its array. Default: so many that 1,000 tasks do all."),
)


def words_of(ctx: click.Context, *left_out: str) -> tuple[str, ...]:
    """The command as it was given, without some options; all options come before the rest."""
    options, others = [str(ctx.info_name)], list[Any]()
    for each in ctx.command.params:
        value, source = ctx.params.get(str(each.name)), ctx.get_parameter_source(str(each.name))
        if isinstance(each, click.Argument):
            others += value if isinstance(value, tuple) else [value]
        elif source is ParameterSource.COMMANDLINE and each.name not in left_out:
            options.append(each.opts[0] if value is True else f"{each.opts[0]}={value}")
    return (*options, "--", *map(str, others))
