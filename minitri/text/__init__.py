"""Filters that look at a text, and the matchers of grammars."""
