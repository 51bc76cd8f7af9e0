"""Kernels of the training step.

`functions` has the differentiable functions and chooses the backend; `pytorch`, `c` (CPU) and `triton` (GPU) implement
them. Only `functions` is imported from outside; the backends do not import it.
"""
