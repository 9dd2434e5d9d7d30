"""Speed against the floor of memory bandwidth, other programs, made-up models, pictures."""
