"""Arrays of a call in the form that the engine needs."""
