"""The benchmarks behind ``scripts/bench.py``: one file per benchmark, and what they share. Not part of the package."""
