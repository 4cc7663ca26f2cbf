"""Packing policies: which samples share a pack. One policy per file, each registered as `POLICY`.

To add one, write a file with a `registry.PackingPolicy` and name it in `registry.BUILT_IN`; users call
`energon_packing.packing.register_policy`.
"""
