"""Questions and answers at a terminal."""
