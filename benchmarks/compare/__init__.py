"""``python -m benchmarks compare``: this package and other libraries on the same inputs in the same run."""
