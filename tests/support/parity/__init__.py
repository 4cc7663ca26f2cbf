"""Packs compared with their samples alone, on tiny models; ``scripts/parity.py`` does it for a user's run."""
