"""Calls: read their arguments, run, repeat, tune and explain them."""
