"""Text to video: clips and captions become packs for a diffusion transformer of the Wan kind.

The stages in their order: `layouts` and `tensor_files` (convert), `record` (what a data set stores), `config`,
`encoder` with its models (measure and render), `pack` (one row), `task_encoder` (Energon). `stored` is packed
directories, `preview` shows packs, `bridge` is the data set for Bridge's recipes. The package reaches all of it through
`energon_packing.sample_kind` alone; without this folder it works.
"""
