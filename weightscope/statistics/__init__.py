"""Statistics of arrays: NumPy arrays in, NumPy float64 arrays out."""
