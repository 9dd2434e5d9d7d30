"""Kernels in Triton, the kernel compiler that comes with PyTorch for GPUs."""
