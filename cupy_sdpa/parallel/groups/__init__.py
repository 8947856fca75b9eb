"""Groups: the members that share out a sequence, and how they exchange arrays."""
