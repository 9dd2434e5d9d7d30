"""Devices: faster ways to compute the same models: CPU kernels, Triton kernels, several GPUs."""
