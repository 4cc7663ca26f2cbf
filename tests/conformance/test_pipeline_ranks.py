"""Steps of real pipelines (Megatron-Core over gloo, stages that sleep) take the time that the simulator says."""

import bridge_here  # noqa: F401
import numpy as np
import pytest
from support import pipeline_ranks

from energon_packing.packing.pipeline import Layout, best_order, simulate

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


def test_a_step_of_real_ranks_takes_what_the_simulator_says_within_five_percent():
    taken = pipeline_ranks.run([sent for sent, _ in CASES])
    for seconds, (sent, expected) in zip(taken, CASES, strict=True):
        shape = [sent[name] for name in ("pipeline", "chunks", "group")]
        print(f"pipeline, chunks, group {shape}: simulated {expected:.3f} s, measured {seconds:.3f} s")
    for seconds, (_, expected) in zip(taken, CASES, strict=True):
        assert seconds == pytest.approx(expected, rel=0.05)
