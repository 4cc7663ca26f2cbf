"""Megatron-Bridge without a GPU: what stands in for CUDA and Transformer Engine, tiny models, and a training run.

For tests, the demo and debugging; nothing here is used where there is a GPU. See ``docs/correctness.md``.
"""
