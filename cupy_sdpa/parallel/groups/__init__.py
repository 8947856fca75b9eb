"""Groups: the members among which sequences are split, and how they exchange arrays."""
