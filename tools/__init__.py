"""Measurements, pictures and checks around the package, for whoever works on it."""

from minitri.devices.cpu.build import let_threads_sleep

let_threads_sleep()  # as the programs do, before PyTorch is imported
