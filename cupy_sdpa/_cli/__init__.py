"""The commands of ``python -m cupy_sdpa``: demo, run and info, one module each."""
