"""Stages that guess and verify nothing: a small model, and n-gram lookup."""
