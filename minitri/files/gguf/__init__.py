"""GGUF files: quantized blocks, and the models that are made of them."""
