"""Forward-mode derivatives: attention's derivative in a direction, from a forward and a backward pass on wider arrays."""
