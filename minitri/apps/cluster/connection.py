"""How a program reaches a Ray cluster, and what each of its engines may take there."""

import argparse
import os
from typing import Any

from minitri.core.errors import InputError, explain, shorten


def connect(args: argparse.Namespace) -> tuple[Any, dict[str, int]]:
    """Ray, and the share of a replica; decides --threads if need be. Raises `InputError`."""
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("--ray needs Ray; install it: pip install 'minitri[ray]'") from None
    own: dict[str, Any] = {}
    if args.ray == "local":  # 256 MB of shared memory, through which only texts go
        cores = os.cpu_count() or 1
        most = (args.replicas + 1) * (args.threads or max(1, cores // args.replicas))
        own = {"num_cpus": max(cores, most)}  # room for one replica more, while it replaces another
        own |= {"include_dashboard": False, "object_store_memory": 256 << 20}
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the death of a replica is told here
    with explain(
        f"no Ray cluster at {shorten(args.ray, 60)}",
        "start one, set RAY_AUTH_MODE=token if it asks for one, or give --ray local",
    ):
        ray.init(args.ray, logging_level="ERROR", log_to_driver=args.verbose, **own)
    there = ray.cluster_resources()
    num_gpus = int(args.device != "cpu" and "GPU" in there)
    cores = cores if own else int(there["CPU"])
    args.threads = args.threads or (1 if num_gpus else max(1, cores // args.replicas))
    return ray, {"num_cpus": args.threads, "num_gpus": num_gpus}
