"""The interpreter: operation graphs computed with numpy, and with CuPy's own operations."""
