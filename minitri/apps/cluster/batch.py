"""Many prompts on many engines: `generate --prompts FILE --ray ADDRESS --output FILE`.

Each replica is a Ray actor with an engine, and takes the next group of prompts, in alphabetical
order, when it is idle. Ray restarts a replica that dies, and gives it its group again. The file of
answers is the only state. Texts are coupled, so that a seed gives one text on every replica.
"""

import argparse
import fcntl
import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from minitri import InputError
from minitri.apps.cli.boot import boot
from minitri.apps.cli.jsonl import Line, answers, check_wrong, read_lines
from minitri.core.errors import explain, shorten
from minitri.text.prompt_ids import draw_seed

key_of = functools.partial(json.dumps, sort_keys=True)  # of an id, for a dictionary
MAX_RESTARTS = 4  # of a replica, by Ray
MAX_GROUP = 16  # prompts, whose answers are written together


def run_on_replicas(args: argparse.Namespace) -> int:
    """Answers the lines of --prompts that --output has no answer to. Raises `InputError`."""
    if args.output is None or args.save_kv is not None:
        raise InputError("--ray needs --output FILE and has no --save-kv; add one, omit the other")
    lines: dict[str, Line] = {}
    for line in read_lines(args):
        key = key_of(line.id)
        if key in lines:
            raise InputError(f"two lines of --prompts have the id {key}; give each its own")
        lines[key] = line
    args.seed = draw_seed() if args.seed is None else args.seed
    args.coupled = True
    with Path(args.output).open("ab+") as file:
        with explain(f"--output {shorten(args.output)} cannot be continued", "name another file"):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = answered(file)
        stream = gathered([line for key, line in lines.items() if key not in done], args)
        total = len(lines)
        for answer in tqdm(stream, total=total, initial=len(done), disable=args.quiet or None):
            written = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
            file.write(written + b"\n")
            file.flush()
            done[key_of(answer["id"])] = "error" in answer
    check_wrong(args, sum(done.values()), total)
    return 0


def answered(file: IO[bytes]) -> dict[str, bool]:
    """Keys of the answers in a file, and whether they are errors. Cuts off an incomplete last line.
    Raises `ValueError` or the like if the file holds something else, and leaves it as it is."""
    file.seek(0)
    *lines, last = file.read().split(b"\n")
    done = {key_of(row["id"]): row["line"] > 0 and "error" in row for row in map(json.loads, lines)}
    if last.endswith(b"}") or not b'{"id": '.startswith(last[:7]):
        raise ValueError("its last line is no answer that was cut off")
    file.truncate(file.tell() - len(last))
    return done


def connect(args: argparse.Namespace) -> tuple[Any, dict[str, int]]:
    """Ray, and the resources of a replica; sets --threads if it is open. Raises `InputError`."""
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("--ray needs Ray; install it: pip install 'minitri[ray]'") from None
    local: dict[str, Any] = {}
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
    return ray, {"num_cpus": args.threads, "num_gpus": num_gpus}


def gathered(lines: list[Line], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers of the replicas, as soon as a group is done. Raises `InputError`."""
    ray, share = connect(args)
    restarts = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    actor = ray.remote(**share, **restarts)(Replica)
    replicas = ray.util.ActorPool([actor.remote(args) for _ in range(args.replicas)])
    lines = sorted(lines, key=lambda line: str(line.fields.get("prompt")))
    size = min(MAX_GROUP, -(-len(lines) // args.replicas)) or 1
    groups = [lines[start : start + size] for start in range(0, len(lines), size)]
    try:
        for done in replicas.map_unordered(lambda replica, g: replica.answers.remote(g), groups):
            yield from done
    except ray.exceptions.RayActorError as error:
        raise InputError(f"replicas keep dying ({shorten(error)}); see their logs") from None


class Replica:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine: Any = None

    def answers(self, lines: list[Line]) -> list[dict[str, Any]]:
        """Answers lines; the first call reads the weights."""
        self._engine = self._engine or boot(self._args)
        return [*answers(self._engine, lines, self._args)]
