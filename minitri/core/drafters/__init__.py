"""Drafters: lookup in the text, and objects of the `Drafter` protocol."""
