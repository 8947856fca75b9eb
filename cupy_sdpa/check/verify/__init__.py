"""Run one problem and compare its results with a float64 reference."""
