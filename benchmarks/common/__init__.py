"""Code that the benchmarks share: timers, arrays on the GPU, versions of the machine, accuracy, and command lines."""
