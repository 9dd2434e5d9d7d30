"""The engine: token ids in, token ids out. Imports torch and the standard library alone."""
