"""Packing policies: which samples share a pack. One policy per file, each registered as `POLICY`.

To add a policy, write a file with a `registry.PackingPolicy` and list it in `registry.BUILT_IN`. Users call
`energon_packing.packing.register_policy` instead.
"""
