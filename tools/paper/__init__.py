"""Tables and figures of the paper, and its baselines."""
