"""Directional derivatives, sums of the weights, and their entropy."""
