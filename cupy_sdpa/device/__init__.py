"""CuPy, the CUDA driver, our CUDA kernels and CUDA graphs."""
