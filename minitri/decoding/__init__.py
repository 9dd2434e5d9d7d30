"""The algorithm: speculative decoding in a cascade of levels. Knows no device and prints nothing."""
