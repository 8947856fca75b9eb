"""CUDA kernels of paged keys and values."""
