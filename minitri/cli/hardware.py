"""Machines for `minitri plan`: GPUs and Apple chips by name, a row each of hardware.txt, and this
one's processor.

GiB of a GPU are those that its driver reports, with ECC as shipped, of an Apple chip the most it is
sold with. GB/s and TFLOP/s are the data sheet's: the link in one direction, dense matrices.
"""

import itertools
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from minitri.gpu.placement import GIB
from minitri.roofline import CARDS, CPU, Machine

REACHED = 0.8
"""Of a data sheet's GB/s, as 25 of the 32 GB/s of PCIe 4.0 x16; and half of its FLOP/s. Assumed."""
REACHED_BY_CORES = 0.5
"""Of an Apple chip's GB/s, all of which only its GPU can use, for which minitri has no kernels."""
TABLE = Path(__file__).with_name("hardware.txt").read_text("utf-8").rstrip()
ROWS = {name: row for name, *row in (line.split(None, 5) for line in TABLE.splitlines()[1:])}


class Site(NamedTuple):
    """Where a model is to run, with the GiB of the memory that computes."""

    name: str
    gib: float
    machine: Machine
    source: str
    is_cpu: bool = False


def site_named(name: str) -> Site:
    """A row of the table, as far as its peaks are reached."""
    gib, memory, link, tflops, source = ROWS[name]
    speed = 1e9 * float(memory)
    if link == "-":
        source += "; an estimate for its CPU cores, not measured: minitri has no Metal kernels"
        return Site(name, float(gib), processor(REACHED_BY_CORES * speed), source, is_cpu=True)
    machine = replace(
        CARDS[48],  # for what launches take
        weight_bytes_per_second=REACHED * speed,
        kv_bytes_per_second=REACHED * speed,
        link_bytes_per_second=REACHED * 1e9 * float(link),
        flops_per_second=0.5e12 * float(tflops),
    )
    return Site(name, float(gib), machine, f"{REACHED:.0%} of {source}")


def processor(speed: float) -> Machine:
    """A CPU whose memory is read at so many bytes per second."""
    kv_speed = speed * CPU.kv_bytes_per_second / CPU.weight_bytes_per_second
    return replace(CPU, weight_bytes_per_second=speed, kv_bytes_per_second=kv_speed)


def this_machine() -> Site:
    """The processor here: its free memory, and how fast PyTorch's threads read it."""
    import torch

    from minitri.gpu.allocation import free_host_bytes

    data = torch.ones(1 << 26)  # 256 MB, beyond most caches
    times = []
    for _ in range(8):
        times.append(time.perf_counter())
        data.sum()
    seconds = sorted(later - sooner for sooner, later in itertools.pairwise(times))
    free = free_host_bytes()
    if math.isinf(free):  # no Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    source = f"measured with {torch.get_num_threads()} threads; memory that is free now"
    return Site("this CPU", free / GIB, processor(data.nbytes / seconds[3]), source, is_cpu=True)
