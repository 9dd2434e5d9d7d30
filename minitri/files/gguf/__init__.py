"""GGUF files: the container, quantized blocks, and the tokenizer in them."""
