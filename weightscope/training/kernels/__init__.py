"""Kernels of the training step: PyTorch's, C's and Triton's, behind one set of differentiable functions."""
