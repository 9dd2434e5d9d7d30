"""The network, and what it asks of a KV cache."""
