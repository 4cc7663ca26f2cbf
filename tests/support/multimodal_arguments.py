"""The arguments with which the scripts of Megatron-LM's ``examples/multimodal`` start a training.

As a program it lists those of a checkout, as tests/support/multimodal_arguments.txt has them:
``multimodal_arguments.py MEGATRON_LM``. The scripts are run as they are, in an empty folder, by a shell that knows no
program but one that notes the arguments of ``torchrun``; folders of theirs become ``PATH``.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHECKOUT = "ENERGON_PACKING_MEGATRON_LM"
"""Environment variable: a checkout of Megatron-LM."""
LISTED = Path(__file__).with_suffix(".txt")
FOLDER = "/multimodal-workspace"


def scripts_of(checkout: Path) -> list[Path]:
    """The scripts that train, in the order of their names."""
    scripts = (checkout / "examples" / "multimodal").rglob("*.sh")
    return sorted(path for path in scripts if "train.py" in path.read_text())


def words_of(script: Path) -> list[str]:
    """The arguments of ``train.py``."""
    with tempfile.TemporaryDirectory() as folder:
        programs, empty, noted = Path(folder, "programs"), Path(folder, "empty"), Path(folder, "noted")
        for each in (programs, empty):
            each.mkdir()
        notes = {
            "torchrun": 'printf "%s\\0" "$@" >"$NOTED"',
            "date": "exit 0",
            "which": "exit 1",
        }  # nor is there a Slurm
        for name, does in notes.items():
            (programs / name).write_text(f"#!/bin/bash\n{does}\n")
            (programs / name).chmod(0o755)
        given = {"PATH": str(programs), "NOTED": str(noted), "WORKSPACE": FOLDER, "LOAD_NAME": "model"}
        subprocess.run(
            ["/bin/bash", script], cwd=empty, env=given | {"LOAD_ITER": "1"}, capture_output=True, check=False
        )
        words = noted.read_text().split("\0")[:-1]
        start = next(number for number, word in enumerate(words) if word.endswith("train.py"))
        place = rf"(?<![^ =])(<some dir>|{FOLDER}|{re.escape(folder)})[^ ]*"
        return re.sub(place, "PATH", " ".join(words[start + 1 :])).split()


def listed() -> dict[str, list[str]]:
    """Script -> arguments, of the commit that the list names."""
    lines = [line for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    return {line.split()[0]: line.split()[1:] for line in lines}


def add_arguments_of(words: list[str], parser: Any) -> Any:
    """Adds what Megatron-LM's parser does not know of these words, as the scripts' ``train.py`` does."""
    for number, word in enumerate(words):
        name, *values = word.split("=")
        if word.startswith("--") and name not in parser._option_string_actions:
            values += [each for each in words[number + 1 :][:1] if not values and not each.startswith("--")]
            kind = int if all(each.isdigit() for each in values) else str
            one = {"type": kind} if kind is int else {"nargs": "*"}
            parser.add_argument(name, **(one if values else {"action": "store_true"}))
    return parser


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    print(f"# Arguments of the scripts below examples/multimodal of Megatron-LM, commit {commit[:12]}.")
    for path in scripts_of(root):
        print(path.relative_to(root / "examples" / "multimodal"), *words_of(path))
