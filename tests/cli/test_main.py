"""The command line as a user meets it: help, unknown words, mistakes, interruption, and what is imported when."""

import io
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from energon_packing.cli.main import CommandGroup, cli, load
from energon_packing.cli.terminal import table
from energon_packing.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> CommandGroup:
    """A group with one command for each way to end."""
    module = ModuleType("energon_packing.cli.end")
    module.__spec__ = ModuleSpec(module.__name__, None)  # so that it can be found

    @click.command()
    @click.argument("how", default="well")
    @click.option("--json", "as_json", is_flag=True)
    @click.pass_context
    def end(ctx: click.Context, how: str, as_json: bool) -> int:
        match how:
            case "mistake":
                raise ConfigError("seq_length: 7 cannot be split over\n 2 ranks; use 8")
            case "bug":
                raise ZeroDivisionError("nothing left")
            case "missing":
                Path("/nonexistent/file").read_text()
            case "interrupt":
                raise KeyboardInterrupt
            case "pipe":
                raise BrokenPipeError(32, "Broken pipe")
            case "unfulfilled":
                ctx.exit(1)
            case "click":
                raise click.ClickException("click's own")
        click.echo("went well")
        return 7  # a command's return value is no exit code

    module.end = end  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = {"end": ("End.",)}

    @click.group(cls=CommandGroup, table=table)
    @click.option("--debug", is_flag=True)
    def root(debug: bool) -> None:
        pass

    return root


def run(group: CommandGroup, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(group, list(arguments), env=environment)


MISTAKE = "seq_length: 7 cannot be split over 2 ranks; use 8"
ENDINGS = {
    "well": (0, "went well\n", ""),
    "unfulfilled": (1, "", ""),
    "mistake": (2, "", f"Error: {MISTAKE}\n"),
    "interrupt": (130, "", "\nInterrupted.\n"),
    "pipe": (141, "", ""),
}
"""How a command ends -> its exit code, output and errors."""


@pytest.mark.parametrize("how", ENDINGS)
def test_each_way_to_end_has_its_exit_code_and_one_sentence_at_most(group: CommandGroup, how: str) -> None:
    result = run(group, "end", how)
    assert (result.exit_code, result.stdout, result.stderr) == ENDINGS[how]


def test_mistakes_with_json_are_an_object_on_stdout(group: CommandGroup) -> None:
    result = run(group, "end", "mistake", "--json")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (2, {"error": MISTAKE}, "")
    result = run(group, "end", "--json", "--no-such-option")
    assert (result.exit_code, "--no-such-option" in json.loads(result.stdout)["error"]) == (2, True)


@pytest.mark.parametrize(("how", "name"), [("bug", "ZeroDivisionError"), ("missing", "FileNotFoundError")])
def test_a_bug_names_its_exception_and_asks_for_a_report_and_its_traceback_is_shown_where_asked_for(
    group: CommandGroup, how: str, name: str
) -> None:
    result = run(group, "end", how, ENERGON_PACKING_DEBUG="0")
    assert (result.exit_code, result.stderr.count("\n"), "Traceback" in result.stderr) == (2, 1, False)
    assert all(word in result.stderr for word in (name, "report"))
    assert "Traceback" in run(group, "--debug", "end", how).stderr
    assert "Traceback" in run(group, "end", how, ENERGON_PACKING_DEBUG="1").stderr


ENDLESS = {
    "click": "click.echo('a line of text')",
    "rich": "say('a line of text')",
}
"""What a command does again and again."""


@pytest.mark.parametrize("how", ENDLESS)
def test_a_reader_that_leaves_early_sees_no_error_and_no_failed_check(how: str) -> None:
    program = (
        "import click, sys\n"
        "from energon_packing.cli import main as m\n"
        "from energon_packing.cli.terminal import say\n"
        "@click.command()\n"
        "def talk():\n"
        f"    for i in range(200000): {ENDLESS[how]}; i or (sys.stdout.flush(), sys.stdin.read())\n"
        "m.CommandGroup.get_command = lambda self, ctx, name: talk\n"
        "m.cli.table = {'talk': None}\n"
        "m.cli.main(['talk'])\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-Pc", program], text=True, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "a line of text\n"
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize("width", [20, 40, 72, 80])
def test_a_table_cuts_no_digit_at_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    numbers = [[f"{10**power + column:,}" for column in range(6)] for power in (3, 6)]
    rows = [(f"data set {name}", *each) for name, each in zip("ab", numbers, strict=True)]
    output = io.StringIO()
    Console(file=output).print(
        table(rows, left=("by data set",), right=("samples", "tokens", *"wxyz"), title="Counts", fold=False)
    )
    words = output.getvalue().replace(";", " ").split()
    assert [word for word in words if word[0].isdigit()] == [each for row in numbers for each in row]
    assert max(map(len, output.getvalue().splitlines())) <= width
    assert words[0] == "Counts"


def test_an_unknown_command_names_the_nearest_known_one_or_all(group: CommandGroup) -> None:
    assert "did you mean 'end'?" in run(group, "endd").stderr
    assert "known: end" in run(group, "xyzzy").stderr


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_each_command_can_be_loaded_and_has_help_with_an_example(name: str) -> None:
    result = run(cli, name, "--help")
    assert result.exit_code == 0, result.output
    assert f"energon-packing {name} " in result.stdout
    assert "--json" in result.stdout
    assert load(name).name == name


def test_a_shell_can_complete_commands_and_options() -> None:
    """In click's own protocol: bash passes the words and the place of the one to complete."""
    for words, place, expected in (
        ("energon-packing pre", "1", "preview"),
        ("energon-packing preview --te", "2", "--text-width"),
    ):
        environment = {"_ENERGON_PACKING_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": place}
        found = CliRunner().invoke(cli, [], prog_name="energon-packing", env=environment)
        assert f"plain,{expected}" in found.output
