"""CPU: compiled kernels for attention, linear layers and sampling, and packed weights."""
