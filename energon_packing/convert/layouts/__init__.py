"""Layouts of records: each turns one into the conversation that `energon_packing.convert.records` reads.

A layout is one file here and one entry of `energon_packing.convert.layouts.registry`.
"""
