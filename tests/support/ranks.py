"""Programs of tests that import once and fork, one process a rank: their environment, their start, their end."""

import contextlib
import importlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from forking_python import freeze_for_good, quick_python

import energon_packing


def ranks_environment(**more: str) -> dict[str, str]:
    """``os.environ`` with one thread, ``more``, this package and `support`, before a ``PYTHONPATH`` that is there.

    What is there stays: it may name another Megatron-Bridge (``scripts/on_bridge.sh``).
    """
    package = str(Path(energon_packing.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def launch(
    program: str,
    *arguments: object,
    folder: Path,
    timeout: float = 400,
    python: str | None = None,
    **environment: str,
) -> None:
    """Runs a program of ranks to its end; what it prints is in ``folder/output.txt``.

    ``python`` is another interpreter than the one whose slow imports are done.

    Raises:
        RuntimeError: the program failed.
    """
    command = [python or quick_python(), "-W", "ignore", program, *map(str, arguments)]
    output = folder / "output.txt"
    with output.open("w") as out:
        # A session of its own: writers of checkpoints outlive the ranks that are killed.
        running = subprocess.Popen(
            command, env=ranks_environment(**environment), stdout=out, stderr=out, start_new_session=True
        )
        try:
            running.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if running.returncode:
        raise RuntimeError(f"the program of the ranks ended with {running.returncode}: {output.read_text()[-20_000:]}")


def processes_below(parent: int, *, served: bool = True) -> list[int]:
    """The processes that this one started, and theirs, by the kernel's own account; ``served`` are those that one of
    them started for any test (`forking_python`)."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, above = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(file.parent.name)] = int(above)
    below = [process for process, above in parents.items() if above == parent]
    if not served:
        below = [each for each in below if b"forking_python.py" not in Path(f"/proc/{each}/cmdline").read_bytes()]
    for process in below:  # which grows
        below += [each for each, above in parents.items() if above == process]
    return below


def terminate(processes: Iterable[int]) -> None:
    """Sends SIGTERM, by a process of its own, as a scheduler does."""
    subprocess.run(["kill", "-TERM", *map(str, processes)], check=True)


def ready() -> None:
    """Before the first fork, after the imports."""
    import PIL.Image

    PIL.Image.init()
    # A rank sets the levels of many of a thousand loggers, and each time the caches of all of them would be cleared.
    logging.root.manager._clear_cache = lambda: None  # type: ignore[attr-defined]
    freeze_for_good()


def free_port() -> int:
    """A port below those that the system gives to others, who might get it before the ranks listen."""
    while True:
        port = secrets.randbelow(12_000) + 20_000
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def torchrun(rank: int, world: int, port: int) -> None:
    """Sets the variables that ``torchrun`` sets."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def fork(world: int, be_rank: Callable[[int], None], *, grace: int = 0) -> bool:
    """Forks ranks and waits for them. Returns whether all of them ended well.

    Where one is killed the others are too; where one fails they get `grace` seconds to say why. What the first rank
    imported is imported here then, for the ranks that are forked after these.
    """
    with tempfile.TemporaryFile("w+") as imported:

        def be(rank: int) -> None:
            try:
                be_rank(rank)
            finally:
                if rank == 0:
                    imported.write("\n".join(sys.modules))
                    imported.flush()

        well = _forked(world, be, grace)
        imported.seek(0)
        for name in imported.read().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    freeze_for_good()
    return well


def _forked(world: int, be_rank: Callable[[int], None], grace: int) -> bool:
    ranks: set[int] = set()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                be_rank(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ranks.add(child)

    def end(*_: object) -> None:
        for other in ranks:
            os.kill(other, signal.SIGKILL)

    well = True
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status and (not grace or os.WIFSIGNALED(status)):
            end()
        elif status:
            signal.signal(signal.SIGALRM, end)
            signal.alarm(grace)
        well = well and not status
    signal.alarm(0)
    return well
