"""Statistics of arrays: arrays in, arrays out, NumPy float64."""
