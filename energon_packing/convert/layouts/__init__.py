"""Layouts of records: each turns one into the conversation that `energon_packing.convert.records` reads.

A file declares one or several, here or in a folder ``layouts`` of another package of this distribution, so that
everything of a kind of sample can live in one folder. `energon_packing.convert.layouts.layout` finds them.
"""

from pathlib import Path

_HERE = Path(__file__).parent
__path__ += sorted(str(folder) for folder in _HERE.parent.parent.glob("*/layouts") if folder != _HERE)
