"""What a GPU adds: attention kernels, captured graphs, KV cache in host memory."""
