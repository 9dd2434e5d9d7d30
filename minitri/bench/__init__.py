"""The benchmark: one method, or several in turns."""
