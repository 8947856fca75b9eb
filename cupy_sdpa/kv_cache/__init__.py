"""Inference: the key/value cache of paged attention, and shared prefixes."""
