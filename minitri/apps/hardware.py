"""GPUs for `minitri plan`, a row each of hardware.txt.

GiB are those that the driver reports, with ECC as shipped. GB/s and TFLOP/s are the data sheet's:
the link in one direction, dense matrices.
"""

from pathlib import Path
from typing import NamedTuple

from minitri.core.roofline import CARDS, Machine, card

REACHED = 0.8
"""Share of a data sheet's GB/s that is reached, as 25 of the 32 GB/s of PCIe 4.0 x16; of its FLOP/s
half is. Assumed."""


class Site(NamedTuple):
    """A GPU to plan for: its name, memory and speeds, and where these numbers come from."""

    name: str
    gib: float
    machine: Machine
    source: str


def site_of_size(gib: float) -> Site:
    """A GPU of which only the memory is known."""
    machine = next(card for most, card in CARDS.items() if gib <= most)
    return Site("a GPU", gib, machine, "assumed by its size; --gpu names a card")


def site_of_row(row: str) -> Site:
    """The GPU in a row of the table, with speeds that are reached in practice."""
    name, gib, memory, link, tflops, source = row.split(None, 5)
    speeds = [REACHED * 1e9 * float(memory), REACHED * 1e9 * float(link), 0.5e12 * float(tflops)]
    return Site(name, float(gib), card(*speeds), f"{REACHED:.0%} of {source}")


TABLE = Path(__file__).with_name("hardware.txt").read_text("utf-8").rstrip()
SITES = {site.name: site for site in map(site_of_row, TABLE.splitlines()[1:])}
