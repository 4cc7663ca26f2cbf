import sys, time; sys.path.insert(0, "/tmp/p48")
import numpy as np
from energon_packing.packing import pipeline as P
from energon_packing.packing.pipeline import *
from measure import real
for m, layout in ((16, Layout(2)), (64, Layout(2)), (64, Layout(4)), (64, Layout(8))):
    for beam, cand, levels in ((4, 64, 4000), (1, 64, 4000), (1, 64, 2000), (1, 16, 2000), (4,16,2000)):
        P.BEAM, P.CANDIDATES, P.LEVELS = beam, cand, levels
        rng = np.random.default_rng(m); ts=[]; r=[]
        for _ in range(6):
            f, b = real(rng, m, layout, "mix"); t = time.process_time(); o = best_order(f, b, layout); ts.append(time.process_time()-t)
            r.append(simulate(f[o], b[o], layout).makespan / lower_bound(f, b, layout))
        print(m, tuple(layout), beam, cand, levels, f"mean {np.mean(r):.4f} max {max(r):.4f} cpu ms {1e3*np.median(ts):.1f}", flush=True)
