"""Context parallelism: time beside one GPU, communication that is hidden, memory, exactness, and a performance model."""
