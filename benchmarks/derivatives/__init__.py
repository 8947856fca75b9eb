"""Directional derivatives (JVP): time, peak memory and accuracy."""
