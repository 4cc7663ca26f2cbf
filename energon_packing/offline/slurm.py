"""A job for Slurm: an array whose tasks each run the command for a list of shards, and a last step that looks."""

import os
import shlex
from collections.abc import Sequence
from itertools import batched, count
from pathlib import Path

from energon_packing.offline.files import replacing, writing

MOST_TASKS = 1000  # by default; Slurm's own ``MaxArraySize`` is 1001
_HEADER = "# Head of job.sh, yours from now on: lines of #SBATCH, then what makes energon-packing known on a node."
_JOB = """\
#!/bin/bash
# Written by energon-packing; header.sh is the place for changes. Submit it with: bash job.sh [OPTIONS OF SBATCH]
#SBATCH --job-name=energon-packing
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
{header}
cd {here} || exit 2
if [ -n "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
    exec energon-packing {name} --tasks={lists}/"$SLURM_ARRAY_TASK_ID" {words}
elif [ "${{1:-}}" = --complete ]; then
    energon-packing {name} --slurm={folder}{each} {words} && [ ! -s {missing} ]
else
    id=$(sbatch --parsable --array=0-{last} "$@" {job}) &&
        sbatch --dependency=afterany:"${{id%%;*}}" "$@" {job} --complete
fi
"""


def write_job(folder: Path, command: Sequence[str], missing: Sequence[str], shards_per_task: int | None) -> None:
    """Writes ``job.sh``, the lists of its tasks, and ``missing.txt``, the shards that nobody has done: what is in a
    list is complete when the shard's own file is there. Lists of a job that was submitted before stay as they are.
    Raises UserError: `folder` cannot be written.

    Args:
        command: its name, its options, and the rest.
        missing: names of shards; none leaves everything but ``missing.txt`` as it is.
    """
    folder = folder.absolute()
    with writing(folder, command[0]):
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "missing.txt", missing)
        if not missing:
            return
        if not (folder / "header.sh").exists():
            _write(folder / "header.sh", [_HEADER])
        lists = next(it for it in (folder / f"lists-{number}" for number in count(1)) if not it.exists())
        lists.mkdir()
        each = shards_per_task or -(-len(missing) // MOST_TASKS)
        shares = list(batched(missing, each))
        for number, share in enumerate(shares):
            _write(lists / str(number), share)
        files = {"job": folder / "job.sh", "missing": folder / "missing.txt", "lists": lists, "folder": folder}
        script = _JOB.format(
            **{name: shlex.quote(str(path)) for name, path in files.items()},
            header=os.fsdecode((folder / "header.sh").read_bytes()),
            here=shlex.quote(str(Path.cwd())),
            name=command[0],
            words=shlex.join(command[1:]),
            each=f" --shards-per-task={shards_per_task}" if shards_per_task else "",
            last=len(shares) - 1,
        )
        _write(folder / "job.sh", [script])  # another file, so that a job that reads the old one does not notice


def _write(file: Path, lines: Sequence[str]) -> None:
    with replacing(file) as aside:
        aside.write_bytes(os.fsencode("".join(f"{line}\n" for line in lines)))  # names need not be UTF-8
