"""What callers pass: arrays, options and functions, read and converted to problems."""
