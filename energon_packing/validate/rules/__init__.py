"""The rules, one file per topic. Imports neither torch nor Bridge."""
