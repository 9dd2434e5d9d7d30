"""Drafters and policies of other papers, by the protocols `minitri.Drafter` and `minitri.Policy`."""
