import sys

sys.path.insert(0, "/tmp/p48")
sys.path.insert(0, "/work/wt/w48/scripts")
from ev import *
from bench.length_lists import synthetic_list
from bench.offline_index import drawn_mix
import energon_packing.packing.policies.window as W

n = 10000
m = drawn_mix(n)
tok = m.length.tolist()
cols = {
    "images": m.images.tolist(),
    "patches": m.patches.tolist(),
    "segments": [1] * n,
    "squares": [x * x for x in tok],
}


def lim(tok, cap, cols, limits, name, ws=(64, 256)):
    ok = [i for i in range(len(tok)) if tok[i] <= cap and all(cols[k][i] <= limits[k] for k in limits)]
    for w in ws:
        run(name, [tok[i] for i in ok], cap, {k: [cols[k][i] for i in ok] for k in limits}, limits, w)


def all_():
    for name, l in (
        ("mix all", {"images": 120, "patches": 80000, "segments": 96}),
        ("mix patches", {"patches": 80000}),
        ("mix 4", {"images": 120, "patches": 80000, "segments": 96, "squares": 32768**2 // 6}),
    ):
        lim(tok, 32768, cols, l, name)
    for nm, img in (("d32", 64), ("e", 48)):
        L = synthetic_list(nm, n)
        lim(L.lengths.tolist(), L.capacity, {"images": L.images.tolist()}, {"images": img}, f"{nm} {img}")
    rows = lists()
    random.Random(5).shuffle(rows)
    rows = rows[:n]
    t_ = [t for _, t in rows]
    u_ = [u for u, _ in rows]
    for u, t in ((18, 6016), (18, 5000)):
        for w in (64, 256):
            run(f"{u}/{t}", t_, t, {"tiles": u_}, {"tiles": u}, w)


if __name__ == "__main__":
    for kw in [eval(a) for a in sys.argv[1:]] or [{}]:
        for k, v in kw.items():
            setattr(W, k, v)
        print(kw, flush=True)
        all_()
