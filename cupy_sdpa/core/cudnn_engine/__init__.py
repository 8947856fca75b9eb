"""Operation graphs compiled to cuDNN execution plans, and the caches of plans in memory and on disk."""
