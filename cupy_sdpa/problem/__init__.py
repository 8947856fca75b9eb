"""What a call computes: shapes, layouts and options, frozen, hashable and validated. No device, no pointer."""
