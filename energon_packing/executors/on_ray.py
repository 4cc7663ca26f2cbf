"""Workers of a Ray cluster: actors of one CPU each, which are given one task at a time."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterable
from typing import Any

from energon_packing.errors import UserError
from energon_packing.executors.work import MOST_DEATHS, MOST_LOSSES, Attempt, Attempts, ExecutorEntry, Results, Work

_OBJECT_STORE_BYTES = 100 << 20
"""Of a cluster of our own. Only the work, tasks and results pass through it, which are small."""
_KNOCK_SECONDS = 10.0
_LOOK_SECONDS = 5.0


class RayWorkers:
    """An executor as `Executor` describes it, of ``count`` workers, or one per CPU of the cluster; of no more than the
    ``tasks``, if these were counted. Every node needs this package and sees the same paths. ``address`` is the
    cluster's, as ``ray.init`` takes it; None takes the environment's ``RAY_ADDRESS``, and without it starts a cluster
    on this machine for as long as it is needed. Raises `UserError`: Ray is not installed."""

    def __init__(self, count: int | None, address: str | None, tasks: int | None = None) -> None:
        # Ray would say how it counts its users, and that a later version treats GPUs otherwise. Its workers are at
        # niceness 15, where a busy machine gives them next to nothing; other executors' are not.
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_worker_niceness"):
            os.environ.setdefault(name, "0")
        try:
            import ray
        except ImportError as error:
            fix = "install it with: pip install '.[ray]' in the checkout"
            raise UserError(f"--executor ray needs Ray ({error}); {fix}") from error
        self._ray: Any = ray
        self._count, self._tasks = count and min(count, tasks or count), tasks
        self._address = address or os.environ.get("RAY_ADDRESS") or None

    def results[Task, Result](self, tasks: Iterable[Task], work: Work[Task, Result]) -> Results[Task, Result]:
        connected = self._connect()  # False in a cluster of the calling program
        actors: list[Any] = []
        try:
            yield from self._results(tasks, work, actors)
        finally:
            for actor in actors:
                with contextlib.suppress(self._ray.exceptions.RayError):
                    self._ray.kill(actor)
            if connected:
                self._ray.shutdown()

    def _connect(self) -> bool:
        """Connects to the cluster; False if the calling program has done so."""
        if self._ray.is_initialized():
            return False
        cpus, memory = self._count or os.cpu_count() or 1, _OBJECT_STORE_BYTES
        own = {"num_cpus": cpus, "num_gpus": 0, "include_dashboard": False, "object_store_memory": memory}
        told: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        sigterm = signal.getsignal(signal.SIGTERM)
        try:
            if self._address is None:
                self._ray.init("local", **own, **told)
            else:
                # Ray itself tries for minutes to reach an address where nothing listens.
                host, _, port = self._address.rpartition("//")[2].rpartition(":")
                if host and port.isdigit():
                    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
                self._ray.init(self._address, **told)
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())[:200]
            if not self._address:
                raise UserError(f"--executor ray: Ray does not start on this machine ({why})") from error
            none_there = f"--address {self._address}: there is no Ray cluster that this machine can join ({why})"
            raise UserError(f"{none_there}; 'ray status' shows a running one") from error
        if callable(sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, sigterm)  # Ray has put its own in its place
        return True

    def _results[Task, Result](
        self, tasks: Iterable[Task], work: Work[Task, Result], actors: list[Any]
    ) -> Results[Task, Result]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray, crashes = self._ray, (self._ray.exceptions.WorkerCrashedError, self._ray.exceptions.OutOfMemoryError)
        kind = ray.remote(num_cpus=1, max_restarts=0)(_Worker)
        ask = ray.remote(num_cpus=0, max_retries=0)(lambda: None)
        attempts = Attempts(tasks, work)
        described = ray.put(work)
        # Of each answer that is to come: what was asked, of whom, about which task; and how a worker ended.
        waiting: dict[Any, tuple[str, Any, Attempt[Task] | None, str]] = {}
        nodes: dict[Any, str] = {}  # of actors
        before: dict[Any, set[str]] = {}  # of each actor, the nodes that were alive when it was made
        free: list[Any] = []

        def alive() -> set[str]:
            return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

        def end(actor: Any) -> None:
            actors.remove(actor)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

        failed_starts, lost_starts = 0, set[int]()  # since one began; those made at once, with one `before`, are one
        to_give: Attempt[Task] | None = None
        while True:
            while (to_give := to_give or attempts.take() or (attempts.take_slow() if free else None)) and free:
                actor = free.pop()
                try:
                    _ = to_give.deaths and ray.get(actor.node.remote(), timeout=_KNOCK_SECONDS)
                except ray.exceptions.RayError:  # it died while it was idle, which would be one more death of the task
                    end(actor)
                    continue
                waiting[actor.do.remote(attempts.sent(to_give))] = "do", actor, to_give, ""
                to_give = None
            # A busy cluster starts some of them late or never, and the others do not wait for them. Nodes may come.
            most = self._count or len(range(int(ray.cluster_resources().get("CPU", 1)))[: self._tasks]) or 1
            now = alive() if to_give is not None and len(actors) < most else set()
            while to_give is not None and len(actors) < most:
                actors.append(kind.remote())
                before[actors[-1]] = now
                waiting[actors[-1].node.remote()] = "node", actors[-1], None, ""
            if not attempts.running:
                return
            patience = attempts.patience() if free else None
            seconds = _LOOK_SECONDS if patience is None else min(patience, _LOOK_SECONDS)  # for nodes that are new
            for done in ray.wait(list(waiting), num_returns=1, timeout=seconds)[0]:
                asked, actor, attempt, how = waiting.pop(done)
                result: Any = None
                lost: Exception | None = None
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, ray.exceptions.RaySystemError):  # it could not even be unpickled there
                        raise _cannot_start(_sentence(error.cause)) from error
                    raise (error.cause if isinstance(error.cause, Exception) else error) from error
                except ray.exceptions.RayError as error:
                    lost = error
                if lost is not None and asked != "life":
                    end(actor)  # one that cannot be reached may live, and would keep its CPU
                if asked == "life" or isinstance(lost, ray.exceptions.ActorUnavailableError):
                    gone = lost is not None and not isinstance(lost, crashes)  # it was preempted, or perhaps is
                    if attempt is not None and (given_up := attempts.died(attempt, how, lost=gone)) is not None:
                        yield attempt.task, given_up  # type: ignore[misc]
                    # Else a node vanished meanwhile.
                    failed_starts += attempt is None and not gone and before[actor] <= alive()
                    lost_starts |= {id(before[actor])} if attempt is None else set()
                    if failed_starts >= MOST_DEATHS or len(lost_starts) >= MOST_LOSSES:
                        raise _cannot_start(how or _sentence(lost))
                elif lost is not None:
                    # Whether it died by itself or with its node says that node: what must run there, runs or cannot.
                    there = NodeAffinitySchedulingStrategy(nodes[actor], soft=False) if actor in nodes else "DEFAULT"
                    told = ask.options(scheduling_strategy=there).remote()
                    waiting[told] = "life", actor, attempt, f"ended: {_sentence(lost)}"
                elif asked == "node":
                    nodes[actor] = result
                    waiting[actor.begin.remote(described)] = "begin", actor, None, ""
                else:
                    free.append(actor)
                    if attempt is None:
                        failed_starts, lost_starts = 0, set[int]()
                    elif attempts.done(attempt):
                        for answer, (what, other, same, _) in [*waiting.items()]:
                            if what == "do" and same is attempt:  # another worker has it, and its answer is nobody's
                                del waiting[answer]
                                end(other)
                                attempts.give_back(attempt)
                        yield attempt.task, result


def _cannot_start(why: str) -> UserError:
    return UserError(
        f"Ray cannot start workers for this command ({why}); install the same version of energon-packing on every node"
    )


def _sentence(error: Exception | None) -> str:
    """The gist of Ray's long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix("System error: ")[:400].rstrip(".") if lines else type(error).__name__


class _Worker:
    """One actor, which is told what to do before it does it."""

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def begin(self, work: Work[Any, Any]) -> None:
        self._work = work
        work.begin()

    def do(self, task: Any) -> Any:
        return self._work.do(task)


EXECUTOR = {"ray": ExecutorEntry(make=RayWorkers, cluster=True)}
