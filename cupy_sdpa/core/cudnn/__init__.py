"""The ctypes binding of cuDNN's backend API: library, constants, descriptors and launches. No other folder uses ctypes."""
