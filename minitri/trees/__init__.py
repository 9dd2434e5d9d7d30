"""Guesses as trees: their shapes, how nodes are drawn and verified, and the level that does so."""
