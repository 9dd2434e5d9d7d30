"""Baselines of the paper, by the protocols `minitri.Drafter` and `minitri.Policy`."""
