"""The kinds of sample; a module declares its kind as ``KIND`` (`energon_packing.sample_kind`).

A folder ``kinds`` in another package of this distribution counts as part of this one, so that everything of a kind can
live in one folder. Other distributions name theirs as entry points of the group ``energon_packing.kinds``.
"""

from pathlib import Path

__path__ += sorted(str(folder) for folder in Path(__file__).parents[1].glob("*/kinds"))
