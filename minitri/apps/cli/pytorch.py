"""Imports PyTorch for a program: set up for speed, with Ctrl-C answered in the meantime."""

import atexit
import gc
import os
import warnings

from minitri.apps.cli.exits import leave, on_ctrl_c


def import_pytorch(*, huge_pages: bool = True) -> None:
    """Imports PyTorch and all that loads models, which takes seconds; a second call does nothing.

    `huge_pages`: large tensors are in pages of 2 MB, which Linux reads 5 % faster, but with which
    short texts of a server take much memory. Variables of the environment that are set win.
    """
    from minitri.devices.cpu.build import let_threads_sleep

    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", str(int(huge_pages)))
    let_threads_sleep()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # an error follows
    gc.disable()  # modules stay: to look for cycles in them takes 0.15 s
    try:
        with on_ctrl_c(leave):  # extension modules may lose a KeyboardInterrupt
            import minitri.loader  # noqa: F401
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules look for what was never freed
        gc.enable()
