"""The ranks of a run: those that torchrun started, or else this process alone."""

import os

from minitri.core.model.execution import Ranks


def join() -> Ranks:
    """The processes that torchrun has started, or this one alone. Raises `InputError`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Ranks()
    from minitri.devices.parallel.group import join_group

    return join_group()
