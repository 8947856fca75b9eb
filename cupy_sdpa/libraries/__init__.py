"""Arrays of PyTorch, JAX, Numba and other libraries as arguments and results of calls, without a copy."""
