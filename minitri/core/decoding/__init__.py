"""The algorithm: speculative decoding in a cascade of levels. It knows no device."""
