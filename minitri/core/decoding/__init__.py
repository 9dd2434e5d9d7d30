"""The algorithm: speculative decoding in a cascade of levels, independent of devices."""
