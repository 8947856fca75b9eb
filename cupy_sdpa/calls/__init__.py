"""One call: its arguments, the arrays that it needs, and how it runs on the engine of its arrays."""
