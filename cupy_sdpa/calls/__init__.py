"""Calls: parse their arguments, and run, repeat, tune and explain them."""
