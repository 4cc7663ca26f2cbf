"""Reports: previews of packs, and the benchmarks behind ``scripts/bench.py``."""
