"""What tests and scripts share and no user needs: processors made offline, Bridge on a CPU, models of a few layers."""
