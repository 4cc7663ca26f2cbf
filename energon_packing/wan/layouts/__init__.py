"""Part of `energon_packing.convert.layouts`."""
