"""Data sets as uint8 tensors, and augmentation vectorised over networks."""
