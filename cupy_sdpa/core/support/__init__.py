"""What each cuDNN version and GPU can run, and the known bugs, as data."""
