"""``python -m benchmarks host_options``: host time of every option, alone and in a mix of calls, against PyTorch."""
