"""GGUF files: the container, its settings, and quantized tensors as weights of a Llama."""
