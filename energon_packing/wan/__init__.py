"""Text to video: clips and captions become packs for a diffusion transformer of the Wan kind.

The stages in their order: `record` (what a data set stores), `config`, `encoder` with `clip` and `models`
(measure and render), `limits` and `pack` (one row), `task_encoder` and `loader` (Energon).
`convert` reads records, `stored` is packed directories, `preview` shows packs, `bridge` is the data set for Bridge's
recipes. The package reaches all of it through `energon_packing.sample_kind` alone; without this folder it works.
"""
