"""Drafters: a small model, lookup in the text, and user objects (`Drafter`)."""
