"""The table of docs/convert.md: files of every layout and source, real ones and made ones, and what became of them.

    python tests/convert/known_files.py          # writes the table anew

Each file has a reader that knows nothing of this package: the trainer's own code (`trainers_code`), or rules written
from its documentation (`plain_readers`). Rows of files that are not on this machine stay as they are.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from made_files import MADE
from plain_readers import KnownFile
from real_files import DEMO, REAL

from energon_packing.convert import ConversionReport, ConvertConfig, convert
from energon_packing.convert.config import read_dataset_info
from energon_packing.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "convert.md"
FILES = [*REAL, *MADE]


def converted(file: KnownFile, path: Path, out: Path) -> ConversionReport | UserError:
    """The conversion of a file as a user would run it, all samples in one split; or why nothing in it is usable."""
    options = dict(file.options)
    if (name := options.pop("entry", None)) is not None:
        found = read_dataset_info(DEMO / "dataset_info.json", name)
        options |= {option: value for option, value in found.items() if option != "sources"}
    config = ConvertConfig(sources=(path,), out=out, workers=1, split={"train": 1.0}, max_rejects=1.0, **options)
    try:
        return convert(config)
    except UserError as error:
        return error


def row_of(file: KnownFile, records: int, report: ConversionReport | UserError) -> str:
    """The row of a file in the table."""
    if isinstance(report, UserError):
        numbers = [f"{records:,}", "0", f"{records} `{file.rejected}`, exit code 2", ""]
    else:
        rejected = ", ".join(f"{count} `{reason}`" for reason, count in report.rejected.items())
        warnings = [f"{count:,} `{name}`" for name, count in report.warnings.items()]
        warnings += [f"ignored `{name}`" for name in report.ignored_columns]
        numbers = [f"{report.read:,}", f"{report.written:,}", rejected, ", ".join(warnings)]
    layout = f"`{file.layout}`" if file.layout else ""
    readers = [file.reader] if file.reader else []
    readers += ["ms-swift's code"] if file.swift else []
    return "| " + " | ".join([file.name, layout, file.source, *numbers, ", ".join(readers)]) + " |"


HEAD = "| file | layout | source | in | out | rejected | warnings | compared with |"


def with_rows(page: str, found: dict[str, str]) -> str:
    """The page with the rows of files by their names; those of other files stay."""
    before, head, rest = page.partition(HEAD + "\n")
    rule, _, rest = rest.partition("\n")
    written = rest.split("\n\n", 1)[0].split("\n")
    old = {row.split(" | ")[0].removeprefix("| "): row for row in written if row}
    table = [found.get(file.name, old.get(file.name, "")) for file in FILES]
    after = rest[len("\n".join(written)) :]
    return before + head + rule + "\n" + "\n".join(row for row in table if row) + after


def main() -> None:
    """Converts every file of this machine and writes their rows into the page."""
    import datasets

    datasets.disable_progress_bars()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for number, file in enumerate(FILES):
            folder = Path(name) / str(number)
            folder.mkdir()
            if (path := file.make(folder)) is not None:
                found[file.name] = row_of(file, len(file.read(path)), converted(file, path, folder / "out"))
                print(found[file.name])
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
