"""The commands of ``python -m cupy_sdpa``, one module each."""
