"""A small GPT for ``demo --generate``: training, generation with a key/value cache, and speculative decoding."""
