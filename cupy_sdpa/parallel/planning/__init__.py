"""Planning: who holds which positions, which calls each member makes, and what they cost."""
