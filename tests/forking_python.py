"""A Python whose slow imports are done: programs that tests start begin at once instead of after ten seconds.

`quick_python` gives the path of an executable that takes what ``python`` takes: ``SCRIPT``, ``-c CODE`` or
``-m MODULE``, after ``-u`` or ``-W FILTER``. It passes its words, environment, directory and streams to a server that
has imported torch, transformers and Megatron-Bridge, but nothing of this package; the server forks, and the fork is the
program. Signals are passed on, exit codes come back, and a program ends with whoever started it. Tests whose subject is
an import, or an environment variable that an import reads, start a real interpreter.
"""

import array
import contextlib
import fcntl
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "energon_packing"
STARTED = "ENERGON_PACKING_QUICK_PYTHON"  # for programs of tests that are tests again
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FREEZE, UNFREEZE = gc.freeze, gc.unfreeze

CLIENT = r"""#!{python} -IS
import json, os, signal, socket, sys
from array import array
words = json.dumps({{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}).encode()
signal.pthread_sigmask(signal.SIG_BLOCK, {forwarded})  # until the child has begun, to which they go
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendmsg([len(words).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [0, 1, 2]))])
server.sendall(words)
lines = server.makefile()
child = int(lines.readline())
for number in {forwarded}:
    signal.signal(number, lambda number, _: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {forwarded})
status = int(lines.readline() or -signal.SIGKILL)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def freeze_for_good() -> None:
    """Keeps the garbage collector off all that is in memory now.

    Energon unfreezes it after every epoch. Each collection then goes through a million imported objects, half a second,
    and writes to every page that a fork shares with its parent.
    """
    gc.collect()
    FREEZE()
    gc.freeze = gc.unfreeze = lambda: None
    gc.get_freeze_count = lambda: 1  # which counts them one by one


def import_slow_modules() -> bool:
    """Imports what is slow to import, and forgets our package again. True where Bridge is there."""
    import torch.utils.data._utils
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2  # closing a loader's worker takes seconds otherwise
    sys.path.insert(0, str(ROOT))
    has_bridge = True
    try:
        # The one import that knows how Bridge is imported on a machine without Transformer Engine.
        from support.bridge_cpu import stand_ins

        stand_ins.install()
        stand_ins.uninstall()
    except Exception as error:
        if not isinstance(error, ImportError) and type(error).__name__ != "UserError":
            raise
        has_bridge = False
    for name in [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, "support")]:
        del sys.modules[name]
    sys.path.remove(str(ROOT))
    freeze_for_good()
    return has_bridge


def be_program(words: list[str], environment: dict[str, str], folder: str) -> None:
    """In the fork: runs what ``python`` would run for these words."""
    import warnings

    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    before = {path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    while words and words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    rest = [path for path in sys.path[1:] if path not in before]
    kind, target, arguments = ("script", words[0], words[1:])
    if target in ("-c", "-m"):
        kind, target, arguments = target, words[1], words[2:]
    first = str(Path(target).resolve().parent) if kind == "script" else folder
    sys.path[:] = [first, *paths, *rest]
    sys.argv[:] = [target if kind == "script" else kind, *arguments]
    if kind == "script":
        runpy.run_path(target, run_name="__main__")
    elif kind == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        exec(compile(target, "<string>", "exec"), sys.modules["__main__"].__dict__ | {"__name__": "__main__"})


def start_program(connection: socket.socket) -> int:
    """Forks the program that a client asks for; gives its process id."""
    head, descriptors, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(12), 0)
    streams = array.array("i")
    for _level, _kind, data in descriptors:
        streams.frombytes(data)
    length, words = int.from_bytes(head, "big"), b""
    while len(words) < length:
        more = connection.recv(1 << 16)
        if not more:
            raise EOFError("the client ended in the middle of its words")
        words += more
    child = os.fork()
    if child:
        for stream in streams:
            os.close(stream)
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        os.closerange(3, 256)
        for name, place, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            buffering = 1 if name == "stderr" else -1
            setattr(sys, name, os.fdopen(place, mode, buffering, encoding="utf-8", errors="replace", closefd=False))
            setattr(sys, f"__{name}__", getattr(sys, name))
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        asked = json.loads(words)
        be_program(asked["words"], asked["environment"], asked["folder"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        end_program(code)
    raise AssertionError("the program has ended")


def end_program(code: int) -> None:
    """Ends this process as an interpreter ends: exit functions, children of multiprocessing, streams."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 255)


def serve(address: str, owner: int) -> None:
    """Forks programs until the process `owner` is gone."""
    sys.modules["forking_python"] = sys.modules["__main__"]  # programs that freeze know the functions of gc by it
    import_slow_modules()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}

    def end(child: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)

    while Path(f"/proc/{owner}").exists():
        for key, _ in waiting.select(0.02 if running else 0.2):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                try:
                    child = start_program(connection)
                except (OSError, EOFError):  # a client that was killed while it asked
                    connection.close()
                    continue
                running[child] = connection
                waiting.register(connection, selectors.EVENT_READ, child)
                with contextlib.suppress(OSError):
                    connection.sendall(f"{child}\n".encode())
            else:  # a client says nothing more: it was killed
                waiting.unregister(key.fileobj)
                end(key.data)
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            end(child)  # what it left running: writers of checkpoints, workers of ranks that were killed
            connection = running.pop(child)
            with contextlib.suppress(KeyError):
                waiting.unregister(connection)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()
    for child in running:
        end(child)
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def quick_python() -> str:
    """Path of the executable; its server is started once for all processes of this test run, and ends with them.

    Raises:
        RuntimeError: the server ended before it could be asked.
    """
    if started := os.environ.get(STARTED):
        return started
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"energon-packing-python-{os.getuid()}-{owner}"
    folder.mkdir(mode=0o700, exist_ok=True)
    executable = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not executable.exists():
            address = folder / "socket"
            start_server(address, owner, folder / "log")
            text = CLIENT.format(python=sys.executable, address=str(address), forwarded=tuple(map(int, FORWARDED)))
            executable.write_text(text)
            executable.chmod(0o700)
    os.environ[STARTED] = str(executable)
    return str(executable)


def start_server(address: Path, owner: int, log: Path) -> None:
    """Starts the server and waits until it listens."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), str(address), str(owner)]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    while not address.exists():
        if server.poll() is not None:
            raise RuntimeError(
                f"the server of tests' programs ended with {server.returncode}: {log.read_text()[-2000:]}"
            )
        time.sleep(0.05)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
