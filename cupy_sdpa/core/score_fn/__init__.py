"""Tracing and differentiation of score and mask functions."""
