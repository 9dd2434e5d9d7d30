"""Many prompts on many engines: `generate --prompts FILE --ray ADDRESS --output FILE`.

Each replica is a Ray actor with an engine. Prompts with a common prefix are a group, whose prefix
one replica reads once; an idle replica takes the longest group left. Ray restarts a replica that
dies, and gives it its group again.

The file of answers is the only state: an id in it is done. Texts are coupled, so that a seed gives
the same text on every replica.
"""

import argparse
import fcntl
import functools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from minitri import InputError
from minitri.apps.cli.boot import boot
from minitri.apps.cli.jsonl import Line, answers, check_wrong, read_lines
from minitri.core.errors import explain, shorten
from minitri.text.prompt_ids import draw_seed

Task = tuple[str, Line]
"""A prompt, and its line of the file."""
key_of = functools.partial(json.dumps, sort_keys=True)
"""Turns an id into a key of a dictionary."""
MAX_RESTARTS = 4
"""Deaths of one replica that Ray makes up for."""
MAX_GROUP = 8
"""Prompts of a group, whose answers are written together."""


def run_on_replicas(args: argparse.Namespace) -> int:
    """Answers the lines of --prompts that --output has no answer to. Raises `InputError`."""
    if args.output is None or args.save_kv is not None:
        raise InputError("--ray needs --output FILE for the answers, and has no --save-kv")
    tasks: dict[str, Task] = {}
    for line in read_lines(args):
        key, prompt = key_and_prompt(line)
        if key in tasks:
            raise InputError(f"two lines of --prompts have the id {key}; give each its own")
        tasks[key] = prompt, line
    args.seed = draw_seed() if args.seed is None else args.seed
    args.coupled = True
    with Path(args.output).open("ab+") as file:
        with explain(f"--output {shorten(args.output)} cannot be continued", "name another file"):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = answered(file)
        stream = gathered([task for key, task in tasks.items() if key not in done], args)
        total = len(tasks)
        for answer in tqdm(stream, total=total, initial=len(done), disable=args.quiet or None):
            written = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
            file.write(written + b"\n")
            file.flush()
            done[key_of(answer["id"])] = "error" in answer
    check_wrong(args, sum(done.values()), total)
    return 0


def key_and_prompt(line: Line) -> tuple[str, str]:
    """Key and prompt in a line of the prompts file; a line that is no JSON fails in a replica."""
    try:
        fields = {**json.loads(line.text)}
    except (TypeError, ValueError, RecursionError):
        fields = {}
    return key_of(fields.get("id", line.number)), str(fields.get("prompt"))


def answered(file: IO[bytes]) -> dict[str, bool]:
    """Keys of the answers in a file, and whether they are errors. Cuts off an incomplete last line.
    Raises `ValueError` or the like if the file holds something else, and leaves it as it is."""
    file.seek(0)
    *lines, last = file.read().split(b"\n")
    rows = map(json.loads, lines)
    done = {key_of(row["id"]): row["line"] > 0 and "error" in row for row in rows}
    if last.endswith(b"}") or not b'{"id": '.startswith(last[:7]):
        raise ValueError("its last line is no answer that was cut off")
    file.truncate(file.tell() - len(last))
    return done


def grouped(tasks: Iterable[Task], most: int) -> list[list[Task]]:
    """Groups of at most `most` prompts that share half of the prompt before, the longest first."""
    groups: list[list[Task]] = []
    for prompt, line in sorted(tasks):
        before = groups[-1][-1][0] if groups else ""
        num = min(len(before), len(prompt)) // 2
        if not groups or before[:num] != prompt[:num] or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append((prompt, line))
    return sorted(groups, key=lambda group: -sum(len(prompt) for prompt, _ in group))


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
    with explain(
        f"no Ray cluster at {shorten(args.ray, 60)}",
        "start one, set RAY_AUTH_MODE=token if it asks for one, or give --ray local",
    ):
        ray.init(args.ray, logging_level="ERROR", log_to_driver=args.verbose, **local)
    resources = ray.cluster_resources()
    num_gpus = int(args.device != "cpu" and "GPU" in resources)
    most = 1 if num_gpus else max(1, int(resources["CPU"]) // args.replicas)
    args.threads = args.threads or most
    return ray, {"num_cpus": args.threads, "num_gpus": num_gpus}


def gathered(tasks: list[Task], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Answers of the replicas, as they come. Raises `InputError`."""
    ray, share = connect(args)
    restarts = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    actor = ray.remote(**share, **restarts)(Replica)
    replicas = ray.util.ActorPool([actor.remote(args) for _ in range(args.replicas)])
    groups = grouped(tasks, min(MAX_GROUP, -(-len(tasks) // args.replicas)))

    def answer(replica: Any, group: list[Task]) -> Any:
        return replica.answers.remote([line for _, line in group])

    try:
        for done in replicas.map_unordered(answer, groups):
            yield from done
    except ray.exceptions.RayActorError as error:
        raise InputError(
            f"a replica died again and again ({shorten(error)}); see its log"
        ) from None


class Replica:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine: Any = None

    def answers(self, lines: list[Line]) -> list[dict[str, Any]]:
        """Answers lines; the first call reads the weights."""
        self._engine = self._engine or boot(self._args)
        return [*answers(self._engine, lines, self._args)]
