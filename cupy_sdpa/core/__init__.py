"""Attention and its gradients: reading a call, its program, the engines that run it, and the caches."""
