"""Planning for GPUs that are not present."""
