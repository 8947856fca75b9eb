"""Planning for GPUs that are not present, and the named problems of the support table."""
