"""CuPy, the CUDA driver, memory and CUDA graphs."""
