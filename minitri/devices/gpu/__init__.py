"""GPU: attention backends, fused modules, and copies of weights in few bits."""
