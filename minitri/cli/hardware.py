"""What `minitri plan` knows of machines: GPUs and Apple chips by name, and this one's processor.

A row each of hardware.txt. GiB of a GPU are those that its driver reports, with ECC as shipped, of
an Apple chip the most it is sold with. GB/s and TFLOP/s are the data sheet's: the link in one
direction, matrices in bfloat16 without sparsity.
"""

import dataclasses
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minitri.gpu.placement import GIB
from minitri.roofline import CARDS, CPU, Machine

REACHED = 0.8
"""Of a data sheet's GB/s, what kernels and copies reach: as 25 of the 32 GB/s of PCIe 4.0 x16. An
assumption, like the next ones."""
REACHED_FLOPS = 0.5
REACHED_BY_CORES = 0.5
"""Of the GB/s of an Apple chip, most of which its GPU alone can use, while minitri, which has no
kernels for that, runs on the CPU cores."""


@dataclass(frozen=True)
class Site:
    """Where a model is to run."""

    name: str
    gib: float
    """Of the memory that computes."""
    machine: Machine
    source: str
    is_cpu: bool = False

    @classmethod
    def of_size(cls, gib: int) -> "Site":
        """A GPU of which only the memory is known."""
        machine = next(card for most, card in CARDS.items() if gib <= most)
        return cls("a GPU", gib, machine, "assumed by its size; --gpu names a card")

    def changed(self, gib: int | None, memory_gb_s: int | None, link_gb_s: int | None) -> "Site":
        """With figures that somebody knows better."""
        machine = self.machine
        if memory_gb_s:
            speed = 1e9 * memory_gb_s
            machine = dataclasses.replace(
                machine, weight_bytes_per_second=speed, kv_bytes_per_second=speed
            )
        if link_gb_s:
            machine = dataclasses.replace(machine, link_bytes_per_second=1e9 * link_gb_s)
        return dataclasses.replace(self, gib=gib or self.gib, machine=machine)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        speed = self.machine.weight_bytes_per_second
        link = None if self.is_cpu else self.machine.link_bytes_per_second
        facts = {"name": self.name, "gib": self.gib, "source": self.source}
        return {**facts, "memory_bytes_per_second": speed, "link_bytes_per_second": link}

    def __str__(self) -> str:
        speed = self.machine.weight_bytes_per_second / 1e9
        link = f", {self.machine.link_bytes_per_second / 1e9:.3g} GB/s from host memory"
        text = f"{self.name}: {self.gib:.1f} GiB at {speed:.0f} GB/s{link * (not self.is_cpu)}"
        return f"{text} ({self.source})"


class Hardware(NamedTuple):
    """A row of the table; an Apple chip has no link and no TFLOP/s that minitri could use."""

    name: str
    gib: float
    memory_gb_s: float
    link_gb_s: float
    tflops: float
    source: str

    def site(self) -> Site:
        """As far as peaks are reached."""
        if math.isnan(self.link_gb_s):
            source = f"{self.source}; an estimate for its CPU cores, not measured: no Metal kernels"
            machine = _processor(1e9 * REACHED_BY_CORES * self.memory_gb_s)
            return Site(self.name, self.gib, machine, source, is_cpu=True)
        speed = 1e9 * REACHED * self.memory_gb_s
        machine = dataclasses.replace(
            CARDS[48],  # what its launches take
            weight_bytes_per_second=speed,
            kv_bytes_per_second=speed,
            link_bytes_per_second=1e9 * REACHED * self.link_gb_s,
            flops_per_second=1e12 * REACHED_FLOPS * self.tflops,
        )
        return Site(self.name, self.gib, machine, f"{REACHED:.0%} of {self.source}")


def _processor(bytes_per_second: float) -> Machine:
    """A CPU by the speed of its memory."""
    share = CPU.kv_bytes_per_second / CPU.weight_bytes_per_second
    return dataclasses.replace(
        CPU,
        weight_bytes_per_second=bytes_per_second,
        kv_bytes_per_second=share * bytes_per_second,
    )


def this_machine() -> Site:
    """The processor here: its free memory, and how fast PyTorch's threads read it."""
    import torch

    from minitri.gpu.allocation import free_host_bytes

    data = torch.ones(1 << 26)  # 256 MB, beyond most caches
    times = []
    for _ in range(7):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    free = free_host_bytes()
    if math.isinf(free):  # no Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    source = f"measured with {torch.get_num_threads()} threads; memory that is free now"
    machine = _processor(data.nbytes / statistics.median(times))
    return Site("this CPU", free / GIB, machine, source, is_cpu=True)


def _read(line: str) -> Hardware:
    name, *words, source = line.split(None, 5)
    gib, memory, link, tflops = (math.nan if word == "-" else float(word) for word in words)
    return Hardware(name, gib, memory, link, tflops, source)


TABLE = Path(__file__).with_name("hardware.txt").read_text("utf-8").rstrip()
HARDWARE = {line.split()[0]: _read(line) for line in TABLE.splitlines()[1:]}
