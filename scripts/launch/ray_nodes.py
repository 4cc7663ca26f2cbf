"""Runs one command on several nodes of a Ray cluster at the same time; the last step of ray.sh.

    ray_nodes.py NODES RESOURCE=NUMBER WORD...

The words ``{rank}``, ``{host}`` and ``{port}`` are replaced by the number of the node, and by the address and a free
port of the first one. If a node fails, the others are stopped, and the program ends with its exit status.
"""

import os
import socket
import subprocess
import sys
from typing import Any


def command_of(words: list[str], rank: int, host: str, port: int) -> list[str]:
    """Returns the words for one node."""
    place = {"{rank}": str(rank), "{host}": host, "{port}": str(port)}
    return [place.get(word, word) for word in words]


def free_place() -> tuple[str, int]:
    """Returns the address of this node, and a port that is free on it now."""
    import ray

    with socket.socket() as free:
        free.bind(("", 0))
        return str(ray.util.get_node_ip_address()), int(free.getsockname()[1])


def run_here(words: list[str], environment: dict[str, str]) -> int:
    """Runs the words on this node; returns their exit status."""
    return subprocess.run(words, env=os.environ | environment, check=False).returncode


def main(nodes: int, resources: dict[str, float], words: list[str]) -> int:
    """Runs the words on all nodes; returns the first exit status that is not 0, or 0."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(log_to_driver=True)
    group = placement_group([resources] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())

    def on_node(rank: int, function: Any, *arguments: Any) -> Any:
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
        options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0)}
        remote = ray.remote(function).options(scheduling_strategy=strategy, max_retries=0, **options)
        return remote.remote(*arguments)

    host, port = ray.get(on_node(0, free_place))
    kept = ("PYTHONPATH", "CUDA_DEVICE_MAX_CONNECTIONS", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    running = [on_node(rank, run_here, command_of(words, rank, host, port), environment) for rank in range(nodes)]
    while running:
        (done, *_), running = ray.wait(running, num_returns=1)
        status = int(ray.get(done))
        if status:
            for task in running:
                ray.cancel(task, force=True)
            return status
    return 0


if __name__ == "__main__":
    name, _, number = sys.argv[2].partition("=")
    raise SystemExit(main(int(sys.argv[1]), {name: float(number)}, sys.argv[3:]))
