"""Inference: the key/value cache of paged attention."""
