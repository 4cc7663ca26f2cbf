import sys, math, random, time, json, importlib.util

sys.path.insert(0, "/tmp/p48")
import numpy as np
from proto import lists
from energon_packing.packing.policies.window import WindowPacker
from energon_packing.packing.statistics import lower_bound
from energon_packing.packing.constraints import Constraints


def run(name, tok, cap, cols, limits, w):
    N = len(tok)
    pk = WindowPacker(cap, w, limits)
    packs = steady = 0
    t0 = time.process_time()
    names = list(limits)
    for i in range(N):
        pk.add(i, tok[i], {n: cols[n][i] for n in names})
        if len(pk) == w:
            pk.next_pack()
            packs += 1
    steady = packs
    left = N and len(pk)
    packs += len(pk.drain())
    us = (time.process_time() - t0) / N * 1e6
    b = lower_bound(np.array(tok), cap, Constraints(costs={n: np.array(cols[n]) for n in names}, limits=limits))
    print(f"{name:22s} w{w:5d} packs {packs:6d} bound {b:6d} {packs / b - 1:8.3%} us {us:6.1f}", flush=True)


if __name__ == "__main__":
    n = int(sys.argv[1])
    ws = [int(x) for x in sys.argv[2].split(",")]
    rows = lists()
    random.Random(5).shuffle(rows)
    rows = rows[:n]
    tok = [t for _, t in rows]
    til = [u for u, _ in rows]
    for u, t in ((18, 6016), (24, 8192), (48, 16384), (18, 5000), (60, 16384), (18, 5600)):
        for w in ws:
            run(f"{u}/{t}", tok, t, {"tiles": til}, {"tiles": u}, w)
