"""What describes a run, as a `energon_packing.validate.run_view.RunView`: one file per kind of source."""
