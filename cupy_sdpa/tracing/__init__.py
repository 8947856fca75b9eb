"""The problems of a program, written to a file: ``CUPY_SDPA_TRACE=file`` and :func:`cupy_sdpa.trace`."""
