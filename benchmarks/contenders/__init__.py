"""The implementations that are timed: this package, PyTorch, FlexAttention, cudnn-frontend and JAX; one module each."""
