"""What docstrings, comments and pages name exists: modules, files, names and options."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = tuple(
    sorted(path for folder in ("energon_packing", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
)
SHELL = tuple(sorted((ROOT / "scripts").rglob("*.sh")))
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
BASES = (ROOT, ROOT / "energon_packing", ROOT / "tests", ROOT / "scripts")
"""Folders that a path in backticks may begin in."""

DOTTED = re.compile(r"energon_packing(?:\.\w+)+")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|sh|md|yaml|toml|jinja)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
ELSEWHERE = {
    "PrimaryFileStore": "Energon",
    "is_full_iteration_cuda_graph": "Megatron-Bridge",
    "validate_cuda_graph_configuration": "Megatron-Bridge",
}
"""Names in backticks that no code of ours has, and whose they are."""


class Text(NamedTuple):
    """A docstring, a comment, or a page, with the file and line where it begins."""

    path: Path
    line: int
    text: str

    def quoted(self) -> Iterator[tuple[str, bool, str]]:
        """What stands in backticks, whether in one on each side, and its place; blocks of code are left out."""
        prose = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), self.text, flags=re.DOTALL)
        for found in re.finditer(r"(?<!`)(`{1,2})([^`\n]+)\1(?!`)", prose):
            if re.match(r"\s+of\s+commit\s", prose[found.end() :]):
                continue  # what an earlier commit had
            line = self.line + prose.count("\n", 0, found.start())
            yield found[2], found[1] == "`", f"{self.path.relative_to(ROOT)}:{line}"


class Module(NamedTuple):
    """What is looked at in one file of code: its docstrings and comments, and all names and other strings."""

    texts: tuple[Text, ...]
    said: tuple[str, ...]


@functools.cache
def looked_at(path: Path) -> Module:
    """A file of code, read once."""
    source = path.read_text(encoding="utf-8")
    texts: list[Text] = []
    said: list[str] = []
    waiting: list[Any] = [ast.parse(source)]
    while waiting:  # `ast.walk` takes four times as long
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts.append(Text(path=path, line=node.lineno, text=str(node.value.value)))
            continue
        for value in vars(node).values():
            if isinstance(value, str):
                said.append(value)
            elif isinstance(value, list):
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                waiting.append(value)
    if re.search("#.*`", source) and not path.is_relative_to(ROOT / "tests"):  # only backticks are looked at
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        texts += [
            Text(path=path, line=each.start[0], text=each.string) for each in tokens if each.type == tokenize.COMMENT
        ]
    return Module(tuple(texts), tuple(said))


@functools.cache
def said_in_code() -> tuple[frozenset[str], str]:
    """All words of the code, and its names and strings together.

    Docstrings are not among the latter, nor what tests say: an option that is gone may be one that a test sees refused.
    """
    paths = [part for path in CODE for part in path.relative_to(ROOT).with_suffix("").parts]
    shell = [path.read_text(encoding="utf-8") for path in SHELL]
    own = [said for path in CODE if not path.name.startswith("test_") for said in looked_at(path).said]
    tests = [said for path in CODE if path.name.startswith("test_") for said in looked_at(path).said]
    whole = "\n".join([*shell, *own])
    return frozenset(re.findall(r"\w+", "\n".join([*paths, *tests, whole]))), whole


def resolves(dotted: str) -> bool:
    """Whether a dotted path from the package leads to a module, or to names in one."""
    folder, parts = ROOT, dotted.split(".")
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    module = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").is_file():
        module = folder / f"{parts.pop(0)}.py"
    return module.is_file() and set(parts) <= set(re.findall(r"\w+", " ".join(looked_at(module).said)))


def missing(text: Text) -> Iterator[str]:
    """Mentions of one text that lead nowhere."""
    names, strings = said_in_code()
    refers = text.path.suffix == ".py"  # where one backtick on each side makes a reference to a name of ours
    for quoted, single, where in text.quoted():
        word = quoted.partition("(")[0]
        if DOTTED.fullmatch(word):
            if not resolves(word):
                yield f"{where}: no {word}"
        elif FILE.fullmatch(quoted):
            # Where no folder of ours has the first name, the path is another project's.
            ours = any((base / quoted.partition("/")[0]).is_dir() for base in BASES)
            if ours and not any((base / quoted).is_file() for base in BASES):
                yield f"{where}: no file {quoted}"
        elif refers and single and NAME.fullmatch(word) and not set(word.split(".")) - names <= ELSEWHERE.keys():
            yield f"{where}: no {word}"
        for option in OPTION.findall(quoted):
            if option not in strings and option[2:].replace("-", "_") not in names:
                yield f"{where}: no option {option}"


def test_every_module_file_name_and_option_that_a_text_mentions_is_there() -> None:
    pages = [Text(path=path, line=1, text=path.read_text(encoding="utf-8")) for path in PAGES]
    own = [text for path in CODE if not path.is_relative_to(ROOT / "tests") for text in looked_at(path).texts]
    wrong = [line for text in [*own, *pages] for line in missing(text)]
    assert not wrong, "\n".join(wrong)
