"""The caller's arrays: read, and converted from other layouts, libraries and dtypes, and back."""
