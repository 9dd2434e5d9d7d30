"""Machines for `minitri plan`: GPUs and Apple chips, a row each of hardware.txt, and this CPU.

A GPU's GiB are those that its driver reports, with ECC as shipped; an Apple chip's are the most it
is sold with. GB/s and TFLOP/s are the data sheet's: the link in one direction, dense matrices.
"""

import os
import statistics
import timeit
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from minitri.apps.cli.pytorch import import_pytorch
from minitri.core.offload.placement import GIB
from minitri.core.roofline import CARDS, CPU, Machine, card

REACHED = 0.8
"""Share of a data sheet's GB/s that is reached, as 25 of the 32 GB/s of PCIe 4.0 x16; of its FLOP/s
half is. Assumed."""
REACHED_BY_CORES = 0.5
"""Share of an Apple chip's GB/s that its CPU cores can use; minitri has no kernels for its GPU."""


class Site(NamedTuple):
    """A machine for a model, with the GiB of the GPU's memory, or of a CPU's."""

    name: str
    gib: float
    machine: Machine
    source: str
    is_cpu: bool = False


def site_of_size(gib: float) -> Site:
    """A GPU of which only the memory is known."""
    machine = next(card for most, card in CARDS.items() if gib <= most)
    return Site("a GPU", gib, machine, "assumed by its size; --gpu names a card")


def processor(speed: float) -> Machine:
    """A CPU that reads its memory at `speed` bytes per second."""
    return replace(CPU, weight_bytes_per_second=speed, kv_bytes_per_second=speed)


def site_of_row(row: str) -> Site:
    """The machine in a row of the table, with speeds that are reached in practice."""
    name, gib, memory, link, tflops, source = row.split(None, 5)
    speed = 1e9 * float(memory)
    if link == "-":
        source += "; an estimate for its CPU cores, not measured: minitri has no Metal kernels"
        return Site(name, float(gib), processor(REACHED_BY_CORES * speed), source, is_cpu=True)
    machine = card(REACHED * speed, REACHED * 1e9 * float(link), 0.5e12 * float(tflops))
    return Site(name, float(gib), machine, f"{REACHED:.0%} of {source}")


TABLE = Path(__file__).with_name("hardware.txt").read_text("utf-8").rstrip()
SITES = {site.name: site for site in map(site_of_row, TABLE.splitlines()[1:])}


def this_machine() -> Site:
    """This machine's CPU: its free memory, and how fast PyTorch's threads read it, measured."""
    import_pytorch()
    import torch

    from minitri.core.offload.allocation import free_host_bytes

    data = torch.ones(1 << 26)  # 256 MB, beyond most caches
    seconds = statistics.median(timeit.repeat(data.sum, number=1, repeat=8))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gib = min(free_host_bytes(), memory) / GIB
    source = f"measured with {torch.get_num_threads()} threads; memory that is free now"
    return Site("this CPU", gib, processor(data.nbytes / seconds), source, is_cpu=True)
