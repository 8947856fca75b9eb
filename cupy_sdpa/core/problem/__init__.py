"""The attention problem: shapes, layouts and options of a call, immutable, hashable and validated; no device, no pointers."""
