"""Many prompts on many engines: `generate --prompts FILE --ray ADDRESS --output FILE`.

Each replica is a Ray actor with an engine, and takes the next group of prompts, in alphabetical
order, when it is idle. Ray restarts a replica that dies, and gives it its group again. Texts are
coupled, so that a seed gives one text on every replica."""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from minitri.apps.cli import boot, jsonl
from minitri.apps.cli.report import Json
from minitri.core.errors import InputError, explain, shorten
from minitri.text.prompt_ids import draw_seed

MAX_RESTARTS = 4  # of a replica, by Ray
MAX_GROUP = 16  # prompts, whose answers are written together


def on_replicas(lines: list[jsonl.Line], args: Namespace) -> Iterator[Json]:
    """Answers prompts by engines on a Ray cluster, in groups as they end. Raises `InputError`."""
    if args.save_kv is not None:
        raise InputError("--ray has no --save-kv; leave one of them out")
    args.seed = draw_seed() if args.seed is None else args.seed
    args.coupled = True
    import ray

    local: Json = {}
    if args.ray == "local":
        most = max(os.cpu_count() or 1, args.replicas * (args.threads or 1))
        # Only texts go through its shared memory.
        local = {"num_cpus": most, "include_dashboard": False, "object_store_memory": 256 << 20}
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # one error is enough
    advice = "start one, set RAY_AUTH_MODE=token if it asks for one, or give --ray local"
    with explain(f"no Ray cluster at {shorten(args.ray, 60)}", advice):
        ray.init(args.ray, logging_level="ERROR", log_to_driver=args.verbose, **local)
    resources = ray.cluster_resources()
    num_gpus = int(args.device != "cpu" and "GPU" in resources)
    most = 1 if num_gpus else max(1, int(resources["CPU"]) // args.replicas)
    args.threads = args.threads or most
    options = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    actor = ray.remote(num_cpus=args.threads, num_gpus=num_gpus, **options)(Replica)
    replicas = ray.util.ActorPool([actor.remote(args) for _ in range(args.replicas)])
    lines = sorted(lines, key=lambda line: str(line.fields.get("prompt")))
    size = min(MAX_GROUP, -(-len(lines) // args.replicas)) or 1
    groups = [lines[start : start + size] for start in range(0, len(lines), size)]
    try:
        for done in replicas.map_unordered(lambda replica, g: replica.answers.remote(g), groups):
            yield from done
    except ray.exceptions.RayActorError as error:
        raise InputError(f"replicas keep dying ({shorten(error)}); see their logs") from None


@dataclass
class Replica:
    """An engine on the Ray cluster, in a process of its own."""

    args: Namespace
    engine: Any = None

    def answers(self, lines: list[jsonl.Line]) -> list[Json]:
        """Answers lines of --prompts; the first call reads the weights."""
        self.engine = self.engine or boot.load_engine(self.args)[0]
        return [*jsonl.answers(lines, self.args, self.engine)]
