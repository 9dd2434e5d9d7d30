"""The engine: token ids in, token ids out. Imports torch and nothing else."""
