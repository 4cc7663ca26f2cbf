"""Text to video: clips and captions become packs for a diffusion transformer of the Wan kind.

The stages in their order: `record` (what a data set stores), `config`, `encoder` with `clip`, `latent_encoder` and
`caption_encoder` (measure and render), `limits`, `patches` and `pack` (one row), `task_encoder` and `loader` (Energon).
Conversion is in `energon_packing.convert`, the data set for Bridge's recipes in `energon_packing.bridge.wan_dataset`.
"""
