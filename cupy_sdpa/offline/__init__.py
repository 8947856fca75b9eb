"""Planning for GPUs that are not present, and the survey that compares the support table with cuDNN's plans."""
