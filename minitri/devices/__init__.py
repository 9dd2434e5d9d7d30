"""The same numbers, sooner: CPU kernels, Triton kernels, several GPUs."""
