"""A file of prompts, answered by many engines on a Ray cluster."""
