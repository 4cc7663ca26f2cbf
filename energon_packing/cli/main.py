"""The command `energon-packing`: finds a subcommand, imports only that one, and reports errors as sentences.

Exit codes: 0 success, 1 a check failed, 2 unusable input or an error, 130 interrupted, 141 the reader of a pipe went
away. A subcommand ends with 1 through ``ctx.exit(1)``, and with 2 by raising `UserError`.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from energon_packing import __version__
from energon_packing.errors import UserError

DEBUG_VARIABLE = "ENERGON_PACKING_DEBUG"

EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE = 128 + 13  # SIGPIPE, which Windows' signal module lacks


@dataclass(frozen=True, kw_only=True, slots=True)
class Subcommand:
    """Where a subcommand lives, and the line that `--help` prints without importing it."""

    target: str
    summary: str
    extras: tuple[str, ...] = ()
    """Extras of the package without which the command does nothing."""

    @property
    def module(self) -> str:
        """The part of `target` that is imported."""
        return self.target.partition(":")[0]

    def load(self) -> click.Command:
        """Imports the module and returns its click command."""
        module, _, attribute = self.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{self.target} is a {type(command).__name__}, not a click command")
        return command


SUBCOMMANDS: dict[str, Subcommand] = {
    "convert": Subcommand(
        target="energon_packing.cli.convert:convert",
        summary="Convert conversation files to an Energon data set.",
    ),
    "explain": Subcommand(
        target="energon_packing.cli.explain:explain",
        summary="Say what happened to one sample, and which setting decided it.",
        extras=("vlm",),
    ),
    "fill": Subcommand(
        target="energon_packing.cli.fill:fill",
        summary="Show how full packs of your own samples would be.",
    ),
    "init": Subcommand(
        target="energon_packing.cli.init:init",
        summary="Write a commented configuration file for a data set.",
    ),
    "measure": Subcommand(
        target="energon_packing.cli.measure:measure",
        summary="Measure all samples of data sets once, without pixels.",
        extras=("offline", "vlm"),
    ),
    "pack": Subcommand(
        target="energon_packing.cli.pack:pack",
        summary="Store the packs of a plan, ready to be trained on.",
        extras=("offline", "vlm"),
    ),
    "parity": Subcommand(
        target="energon_packing.cli.parity:parity",
        summary="Compare packs with their samples alone, on a model.",
        extras=("vlm",),
    ),
    "plan": Subcommand(
        target="energon_packing.cli.plan:plan",
        summary="Plan the packs of a whole run from measured indexes.",
        extras=("offline",),
    ),
    "preview": Subcommand(
        target="energon_packing.cli.preview:preview",
        summary="Build real packs and show each of their samples.",
        extras=("vlm",),
    ),
    "size": Subcommand(
        target="energon_packing.cli.size:size",
        summary="Estimate hours, storage and memory of an offline run.",
        extras=("offline", "vlm"),
    ),
    "ledger": Subcommand(
        target="energon_packing.cli.ledger:ledger",
        summary="Count what a run emitted and dropped, over all restarts.",
    ),
    "profile": Subcommand(
        target="energon_packing.cli.profile:profile",
        summary="Count what the loader costs on your data, by stage.",
        extras=("vlm",),
    ),
    "state": Subcommand(
        target="energon_packing.cli.state:state",
        summary="Make the saved state of an online run portable.",
        extras=("offline", "vlm"),
    ),
    "stats": Subcommand(
        target="energon_packing.cli.stats:stats",
        summary="Show how samples are distributed and how full packs would be.",
        extras=("offline",),
    ),
    "validate": Subcommand(
        target="energon_packing.cli.validate:validate",
        summary="Check a configuration against Bridge's rules and ours.",
    ),
    "verify": Subcommand(
        target="energon_packing.cli.verify:verify",
        summary="Check that a packed directory holds what its plan says.",
        extras=("offline", "vlm"),
    ),
    "watch": Subcommand(
        target="energon_packing.cli.watch:watch",
        summary="Show the metrics of a training run while it runs.",
    ),
}


def _is_present(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def nearest(word: str, known: Sequence[str]) -> str:
    """The end of an error about an unknown word: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}."


class CommandGroup(click.Group):
    """A click group that knows its subcommands by name, imports one when it is used, and reports errors in one place.

    The error report is in `main` (not in a wrapper around it) so that click's test runner sees what a user sees.
    """

    def __init__(self, *args: Any, table: dict[str, Subcommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the subcommands whose module is installed; none is imported."""
        return [name for name, subcommand in self.table.items() if _is_present(subcommand.module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one subcommand; None for an unknown name."""
        return self.table[cmd_name].load() if cmd_name in self.list_commands(ctx) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but the error about an unknown name suggests the nearest one.

        Raises:
            click.UsageError: there is no such subcommand.
        """
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"No such command {args[0]!r}; {nearest(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands with the lines of the table; click's own listing would import each for its help."""
        rows = [(name, _line(self.table[name])) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Runs the command line and exits: 0, 1 or 2 as the subcommand says, 130 after Ctrl-C, 141 after a closed pipe.

        With ``standalone_mode=False`` it is click's own method, which returns and raises.
        """
        if not extra.pop("standalone_mode", True):
            return super().main(args, prog_name, standalone_mode=False, **extra)
        arguments = list(sys.argv[1:] if args is None else args)
        # A shell asks for completions through a variable; click answers and exits.
        self._main_shell_completion({}, prog_name or "energon-packing")
        code = _run(self, arguments, prog_name or "energon-packing", extra)
        sys.exit(code)


def _line(subcommand: Subcommand) -> str:
    return f"{subcommand.summary} [{','.join(subcommand.extras)}]" if subcommand.extras else subcommand.summary


def _run(group: CommandGroup, arguments: list[str], name: str, extra: dict[str, Any]) -> int:
    debug = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or _group_flag(arguments, "--debug")
    as_json = "--json" in arguments
    try:
        with group.make_context(name, list(arguments), **extra) as context:
            group.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        return _report_click(error, as_json)
    except UserError as error:
        if debug:
            traceback.print_exc()
        return _report(_one_line(error), as_json)
    except (KeyboardInterrupt, click.Abort):
        click.echo("\nInterrupted.", err=True)
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if debug:
            traceback.print_exc()
        from energon_packing.cli.extras import missing_extra

        word = next((argument for argument in arguments if argument in group.table), "")
        wanted = group.table[word].extras if word else ()
        return _report(missing_extra(error, word, wanted) or _unexpected(error), as_json)
    except OSError as error:
        if error.errno == errno.EPIPE:
            _close_stdout()
            return EXIT_PIPE
        if debug:
            traceback.print_exc()
        return _report(_unexpected(error), as_json)
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(_unexpected(error), as_json)


def _group_flag(arguments: list[str], flag: str) -> bool:
    """Whether `flag` comes before the subcommand. Errors can occur before click has parsed anything."""
    for argument in arguments:
        if not argument.startswith("-"):
            return False
        if argument == flag:
            return True
    return False


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unexpected(error: Exception) -> str:
    return (
        f"Unexpected {type(error).__name__}: {_one_line(error)} "
        "(unless the message explains it, this is a bug in energon-packing: please report it "
        "with the output of `energon-packing --debug ...`)"
    )


def _report(sentence: str, as_json: bool) -> int:
    """Reports one error: JSON on stdout for machines, else one sentence on stderr."""
    if as_json:
        click.echo(json.dumps({"error": sentence}))
    else:
        click.echo(f"Error: {sentence}", err=True)
    return EXIT_UNUSABLE


def _report_click(error: click.ClickException, as_json: bool) -> int:
    if as_json:
        _report(error.format_message(), as_json)
    else:
        error.show()
    # A command may have its own code; click's default of 1 means "a check failed" here.
    return EXIT_UNUSABLE if error.exit_code == 1 else error.exit_code


def _close_stdout() -> None:
    """Sends the interpreter's last flush to nowhere, so that it prints no second error."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (lives until the process ends)


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value or context.resilient_parsing:
        return
    click.echo(f"energon-packing {__version__}")
    context.exit()


@click.group(
    cls=CommandGroup,
    table=SUBCOMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Each command has its own --help, with examples. [NAMES] are extras that a command needs, as in pip install "
    "'energon-packing[vlm]'. Exit codes: 0 done, 1 a check failed, 2 unusable input.",
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help=f"Show the traceback of an error (also: {DEBUG_VARIABLE}=1).")
def cli(debug: bool) -> None:
    """Exact sequence packing of conversations with images and videos for Megatron-Energon and Megatron-Bridge."""
    # `_run` reads `debug`: an error may occur before this body runs.


def main() -> NoReturn:
    """Entry point of the console script."""
    # What `energon_packing.encoders.tokenized.use_one_thread` does, before a worker is forked and without its imports.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    cli.main(prog_name="energon-packing")
    raise AssertionError("click's main ends the process")


if __name__ == "__main__":
    main()
