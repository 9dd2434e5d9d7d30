"""What measures: methods against one another, other programs, made-up weights."""
