"""The only room that speaks C: find cuDNN, its constants, descriptors, and the calls of the hot path."""
