"""Descriptions of a run as an `energon_packing.validate.run_view.RunView`: one file per kind of source."""
