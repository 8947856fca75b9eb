"""Attention in other libraries: a function with gradients for PyTorch, a layer for Thinc. Each module imports its library."""
