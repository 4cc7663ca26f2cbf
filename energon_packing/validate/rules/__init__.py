"""The rules, one file per topic."""
