"""Kernels of the training step: `functions` computes with `pytorch` or with C (`c/`), which `build` compiles."""
