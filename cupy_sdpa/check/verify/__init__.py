"""Run one case and compare its results with a float64 reference."""
