"""The problems of a trace (:func:`cupy_sdpa.trace`): read, plan, verify and time them."""
