import sys

sys.path.insert(0, "/tmp/p48")
from ev import *
from energon_packing.packing.policies.best_fit import pack_limited
import resource

rows = np.array(lists())
n = int(sys.argv[1])
r = np.random.default_rng(1)
d = rows[r.integers(0, len(rows), n)]
til = d[:, 0]
text = np.maximum((d[:, 1] - 256 * d[:, 0]) * np.exp(r.normal(0, 0.15, n)), 20).astype(np.int64)
tok = 256 * til + text
print("kinds", len(np.unique(tok * 8 + til)), "text", np.percentile(text, [0, 50, 99, 100]))
for u, t in ((18, 6016), (18, 5000), (18, 5600), (48, 16384), (60, 16384)):
    c = Constraints(costs={"tiles": til}, limits={"tiles": u})
    b = lower_bound(tok, t, c)
    t0 = time.process_time()
    p = pack_limited(tok, t, c)
    s = time.process_time() - t0
    print(
        u,
        t,
        len(p),
        b,
        f"{len(p) / b - 1:.4%} s {s:.1f} GiB {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",
        flush=True,
    )
