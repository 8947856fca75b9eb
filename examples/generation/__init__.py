"""Generation with a key/value cache: a small GPT, decoding, continuous batching and speculative decoding."""
