"""The command `energon-packing`: finds a subcommand, imports only that one, and reports errors as sentences.

Exit codes: 0 success, 1 a check failed, 2 unusable input or an error, 130 interrupted, 141 the reader of a pipe went
away. A subcommand ends with 1 through ``ctx.exit(1)``, and with 2 by raising `UserError`.
"""

import contextlib
import difflib
import errno
import io
import itertools
import json
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import click

from energon_packing import __version__
from energon_packing.errors import UserError

DEBUG_VARIABLE = "ENERGON_PACKING_DEBUG"


SUBCOMMANDS: dict[str, tuple[str, ...]] = {
    "convert": ("Convert conversation files to an Energon data set.",),
    "explain": ("Say what happened to one sample, and which setting decided it.", "offline", "vlm"),
    "init": ("Write a commented configuration file for a data set.",),
    "ledger": ("Count what a run emitted and dropped, over all restarts.",),
    "measure": ("Measure all samples of data sets once, without pixels.", "offline", "vlm"),
    "pack": ("Store the packs of a plan, ready to be trained on.", "offline", "vlm"),
    "plan": ("Plan the packs of a whole run from measured indexes.", "offline"),
    "preview": ("Build real packs and show each of their samples.", "offline", "vlm"),
    "state": ("Make the saved state of an online run portable.", "offline", "vlm"),
    "stats": ("Show how samples are distributed, and how full packs would be.", "offline"),
    "validate": ("Check a configuration against Bridge's rules and ours.",),
    "verify": ("Check that a packed directory holds what its plan says.", "offline", "vlm"),
}
"""Subcommands, each in the module of its name: the line that ``--help`` prints, and the extras of the package without
which it does nothing."""


def load(name: str) -> Any:
    """Imports the module of a subcommand and returns its click command."""
    return pkgutil.resolve_name(f"energon_packing.cli.{name}:{name}")


class CommandGroup(click.Group):
    """A click group that knows its subcommands by name, imports one when it is used, and reports errors in one place.
    The error report is in `main` (not in a wrapper around it) so that click's test runner sees what a user sees."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, ...]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in self.table else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, but an error about an unknown name suggests the nearest one."""
        if args[0] not in self.table and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.table, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self.table)}."
            raise click.UsageError(f"No such command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the subcommands with the lines of the table; click's own listing would import each for its help."""
        rows = [(name, told + f" [{','.join(extras)}]" * bool(extras)) for name, (told, *extras) in self.table.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]
        """Runs the command line and exits: 0, 1 or 2 as the subcommand says, 130 after Ctrl-C, 141 after a closed pipe.
        With ``standalone_mode=False`` it is click's own method, which returns and raises."""
        if not extra.pop("standalone_mode", True):
            return super().main(args, prog_name, standalone_mode=False, **extra)
        name = prog_name or "energon-packing"
        # A shell asks for completions through a variable; click answers and exits.
        self._main_shell_completion({}, name)
        sys.exit(_run(self, list(sys.argv[1:] if args is None else args), name, extra))


def _run(group: CommandGroup, arguments: list[str], name: str, extra: dict[str, Any]) -> int:
    # Errors can occur before click has parsed anything.
    before_command = itertools.takewhile(lambda word: word.startswith("-"), arguments)
    debug = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") or "--debug" in before_command
    as_json = "--json" in arguments
    try:
        code = 0
        try:
            with group.make_context(name, list(arguments), **extra) as context:
                group.invoke(context)
        except click.exceptions.Exit as end:
            code = end.exit_code
        except SystemExit as end:  # what rich makes of a closed pipe, with the code of a failed check
            raise end.__context__ if isinstance(end.__context__, BrokenPipeError) else end from None
        sys.stdout.flush()
        return code
    except click.ClickException as error:
        if as_json:
            _report(error.format_message(), as_json)
        else:
            error.show()
        # A command may have its own code; click's default of 1 means "a check failed" here.
        return 2 if error.exit_code == 1 else error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("\nInterrupted.", err=True)
        return 128 + signal.SIGINT
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            # The interpreter's last flush goes to nowhere, so that it prints no second error.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        if debug:
            traceback.print_exc()
        command = next((argument for argument in arguments if argument in group.table), "")
        return _report(_sentence(error, group, command), as_json)


def _sentence(error: Exception, group: CommandGroup, command: str) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return line
    if isinstance(error, ModuleNotFoundError):
        from energon_packing.sample_kind import what_is_needed  # late: most commands end without an error

        needed = what_is_needed(error, command or "this", group.table[command][1:] if command else ())
        if needed is not None:
            return needed
    bug = "this is a bug in energon-packing: please report it with the output of `energon-packing --debug ...`"
    return f"Unexpected {type(error).__name__}: {line} (unless the message explains it, {bug})"


def _report(sentence: str, as_json: bool) -> int:
    from energon_packing.report.excerpt import visible  # late, as above

    click.echo(json.dumps({"error": sentence}) if as_json else f"Error: {visible(sentence)}", err=not as_json)
    return 2


@click.group(
    cls=CommandGroup,
    table=SUBCOMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Each command has its own --help, with examples. [NAMES] are extras that a command needs, as in pip install "
    "'.[vlm]' in a checkout. Exit codes: 0 done, 1 a check failed, 2 unusable input.",
)
@click.version_option(__version__, message=f"energon-packing {__version__}")
@click.option("--debug", is_flag=True, help=f"Show the traceback of an error (also: {DEBUG_VARIABLE}=1).")
def cli(debug: bool) -> None:
    """Exact sequence packing of conversations with images and videos for Megatron-Energon and Megatron-Bridge."""
    # `_run` reads `debug`: an error may occur before this body runs.


def main() -> None:
    """Entry point of the console script."""
    # What `energon_packing.encoders.tokenized.use_one_thread` does, before a worker is forked and without its imports.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):  # keys and bars hold characters that a terminal's encoding may lack
        if isinstance(stream, io.TextIOWrapper):  # None without a terminal
            stream.reconfigure(errors="backslashreplace")
    cli.main(prog_name="energon-packing")


if __name__ == "__main__":
    main()
