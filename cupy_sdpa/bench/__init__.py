"""``python -m cupy_sdpa bench``: our calls beside everybody else's, on the same numbers, in the same run.

Importing :mod:`cupy_sdpa` does not import this room, and nothing here is part of the public interface.
"""
