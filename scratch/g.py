import sys, time; sys.path.insert(0, "tests/conformance")
import test_pipeline_ranks as t
from support import pipeline_ranks
from energon_packing.packing.pipeline import Layout
c = [t.case(l, 8, s, ordered=o) for l in (Layout(2), Layout(2, 2)) for s, o in ((1, False), (1, True))]
got = pipeline_ranks.run([x for x, _ in c])
for g, (x, e) in zip(got, c): print(x["pipeline"], x["chunks"], f"simulated {e:.3f} measured {g:.3f} {g/e-1:+.3f}")
