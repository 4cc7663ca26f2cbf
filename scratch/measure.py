import sys, time
from itertools import permutations
import numpy as np
from energon_packing.packing import pipeline as P
from energon_packing.packing.pipeline import *

def real(rng, m, layout, kind):
    S = layout.ranks * layout.chunks
    tokens = rng.uniform(.9, 1, m)
    attn = rng.beta(.6, 2, m)
    f = np.repeat((tokens + .4 * attn)[:, None], S, 1) / layout.chunks
    v = rng.choice([0, .5, 2.5], m, p=[.6, .32, .08]) * rng.uniform(.5, 1.5, m) if kind == "mix" else rng.uniform(0, .6, m)
    f[:, 0] += v / layout.chunks
    f[:, -1] += .3 * tokens / layout.chunks
    b = 2 * f
    if kind == "uniform":
        f, b = rng.random((m, S)), 2 * rng.random((m, S))
    return f, b

def main(counts, layouts, n=20):
    for m in counts:
        if m <= 8: allp = np.array(list(permutations(range(m))))
        for layout in layouts:
            try: P._graph(m, layout)
            except Exception as e: print(m, layout, e); continue
            for kind in ("mix", "flat", "uniform"):
                rng = np.random.default_rng(m)
                r, lb, gv, ts = [], [], [], []
                for _ in range(n if m > 8 else max(3, n // 4)):
                    f, b = real(rng, m, layout, kind)
                    t = time.perf_counter(); o = best_order(f, b, layout); ts.append(time.perf_counter() - t)
                    got = simulate(f[o], b[o], layout).makespan
                    bound = lower_bound(f, b, layout)
                    lb.append(got / bound); gv.append(simulate(f, b, layout).makespan / bound)
                    if m <= 8:
                        costs = np.array([f, b]); g = P._graph(m, layout)
                        best = min(g.ends(costs, c).max(axis=0).min() for c in np.array_split(allp, 20))
                        r.append(got / best)
                print(m, tuple(layout), kind, f"given/bound {np.mean(gv):.3f}  ours/bound mean {np.mean(lb):.4f} max {max(lb):.4f}", f"ours/best max {max(r):.4f}" if r else "", f"ms {1e3*np.median(ts):.1f} max {1e3*max(ts):.1f}", flush=True)
if __name__ == "__main__":
    L = [Layout(2), Layout(4), Layout(8), Layout(2, 2), Layout(4, 2), Layout(8, 4)]
    if sys.argv[1] == "small": main([7, 8], L[:5])
    else: main([int(x) for x in sys.argv[1].split(",")], L)
