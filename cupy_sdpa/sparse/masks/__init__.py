"""Block masks: their evaluation, their blocks, and the segments of masks whose rows are intervals."""
