"""The offline road: a whole data set is measured once, planned in seconds, and trained on by any number of ranks.

1. `index` is what ``energon-packing measure`` writes: one row per source sample, without a pixel.
2. `plan` is what ``energon-packing plan`` writes: which samples every pack of a run holds, in a global order.
3. `packs` reads the packs of a plan straight from the source data sets, by their positions in the shards; `pack` stores
   them, and `packed` reads what is stored.
"""
