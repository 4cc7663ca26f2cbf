"""The road through Megatron-Energon: cookers, the packing task encoder, its window, the loader."""
