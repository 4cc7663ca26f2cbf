"""Layouts of records: each turns one into the conversation that `energon_packing.convert.records` reads.

A layout is one file here; `energon_packing.convert.layouts.layout` finds it.
"""
