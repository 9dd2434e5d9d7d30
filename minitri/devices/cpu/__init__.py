"""What a CPU adds: attention kernels and packed weights."""
