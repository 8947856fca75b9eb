"""FP8 attention: times beside bfloat16 and PyTorch, and errors against the number of keys."""
