"""``python -m benchmarks packed``: packed (varlen) sequences against PyTorch and cudnn-frontend."""
