"""Steps of real pipelines (Megatron-Core over gloo, stages that sleep) take no less time than the simulator says."""

import bridge_here  # noqa: F401
import numpy as np
import pytest
from support import pipeline_ranks

from energon_packing.packing.pipeline import Layout, best_order, operations, simulate

pytestmark = pytest.mark.timeout(400)


def case(layout, count, seed, *, ordered):
    """A step of packs of which some have images: passes of 30 to 100 ms, so that a loaded machine adds little."""
    random = np.random.default_rng(seed)
    stages = layout.ranks * layout.chunks
    forward = np.full((count, stages), 0.03) * random.uniform(1, 1.3, (count, 1))
    forward[:, 0] += random.choice([0, 0.03], count) * random.uniform(0.5, 1, count)
    backward = 1.5 * forward
    order = best_order(forward, backward, layout) if ordered else list(range(count))
    forward, backward = forward[order], backward[order]
    sent = {"pipeline": layout.ranks, "chunks": layout.chunks, "group": layout.group}
    sent |= {"forward": forward.tolist(), "backward": backward.tolist()}
    return sent, simulate(forward, backward, layout).makespan


CASES = [
    case(layout, 8, seed, ordered=ordered)
    for layout in (Layout(2), Layout(2, 2), Layout(2, 2, 4))
    for seed, ordered in ((1, False), (2, True))
]


def test_real_ranks_run_the_operations_of_the_simulator_in_its_order_and_take_no_less_time():
    """How much more time they take depends on the machine: ``pytest -s`` prints it."""
    for ranks, (sent, expected) in zip(pipeline_ranks.run([sent for sent, _ in CASES]), CASES, strict=True):
        layout = Layout(sent["pipeline"], sent["chunks"], sent["group"])
        seconds = ranks[0][0]
        print(f"{layout}: simulated {expected:.3f} s, measured {seconds:.3f} s")
        assert [ran for _, ran in ranks] == [list(map(list, row)) for row in operations(len(sent["forward"]), layout)]
        assert seconds > 0.99 * expected
