"""Score and mask functions: traced to expressions, and differentiated."""
