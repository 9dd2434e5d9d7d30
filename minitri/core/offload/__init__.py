"""The full cache in host memory: its pipeline, how prompts are read into it, the memory itself."""
