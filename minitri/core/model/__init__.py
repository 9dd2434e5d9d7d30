"""The Llama network: layers, attention, rotary embedding, and its interface to KV caches."""
