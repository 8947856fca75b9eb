"""The benchmarks: ``python -m benchmarks COMMAND`` in the repository's root. They are not part of the installed package."""
