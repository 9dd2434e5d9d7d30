"""The network, and the interface of its KV cache."""
