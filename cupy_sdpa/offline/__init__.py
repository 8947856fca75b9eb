"""Planning for GPUs that are not present, with the real cuDNN in separate processes."""
