"""Part of `energon_packing.kinds`."""
