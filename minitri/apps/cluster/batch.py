"""Many prompts on many engines: `generate --prompts FILE --ray ADDRESS --output FILE`.

Each replica is a Ray actor with an engine. Prompts with a common prefix are a group, whose prefix
one replica reads once; an idle replica takes the longest group left. If a replica dies, another one
starts, and the unanswered prompts of the group are put back.

The file of answers is the only state: an id in it is done. Texts are coupled, so that a seed gives
the same text on every replica.
"""

import argparse
import fcntl
import functools
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from minitri import InputError
from minitri.apps.cli.boot import boot
from minitri.apps.cli.jsonl import Line, answers, check_wrong, read_lines
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.text.prompt_ids import draw_seed

Task = tuple[str, Line]
"""A prompt, and its line of the file."""
key_of = functools.partial(json.dumps, sort_keys=True)
"""Turns an id into a key of a dictionary."""
MOST_DEATHS = 5
"""Replicas that may die in a row without an answer."""
OBJECT_STORE_BYTES = 256 << 20
"""Shared memory of a local cluster, through which only texts go."""


def run_on_replicas(args: argparse.Namespace) -> None:
    """Answers the lines of --prompts that --output has no answer to. Raises `InputError`."""
    if args.output is None or args.save_kv is not None:
        raise InputError("--ray needs --output FILE for the answers, and has no --save-kv")
    tasks: dict[str, Task] = {}
    for line in read_lines(args):
        key, prompt = understood(line)
        if tasks.setdefault(key, (prompt, line)) != (prompt, line):
            raise InputError(f"two lines of --prompts have the id {key}; give each its own")
    args.seed = draw_seed() if args.seed is None else args.seed
    args.coupled = True
    counts = Counter[str]()
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
            counts.update({name: num for name, num in answer.items() if name.startswith("num_")})
    num, num_cached = (counts[f"num_{name}_tokens"] for name in ("prompt", "cached"))
    log.info("%d answers; of %d tokens of new prompts %d were cached", len(done), num, num_cached)
    check_wrong(args, sum(done.values()), total)


def understood(line: Line) -> tuple[str, str]:
    """Key and prompt of a line, if it is JSON; if it is not, a replica says what is wrong."""
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
    with suppress(ValueError):
        json.loads(last)
        last = b"whole"
    if last[:7] != b'{"id": '[: len(last)]:
        raise ValueError("its last line is no answer that was cut off")
    file.truncate(file.tell() - len(last))
    return done


def grouped(tasks: Iterable[Task], most: int) -> list[list[Task]]:
    """Groups of prompts that share half of the prompt before, the longest group first. A group has
    at most `most` prompts, so that every replica has work."""
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
    cores = os.cpu_count() or 1
    local: dict[str, Any] = {}
    if args.ray == "local":  # with room for a replica more, which replaces another one
        most = (args.replicas + 1) * (args.threads or max(1, cores // args.replicas))
        local = {"num_cpus": max(cores, most), "include_dashboard": False}
        local |= {"object_store_memory": OBJECT_STORE_BYTES}
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # `gathered` reports dead replicas
    with explain(
        f"no Ray cluster at {shorten(args.ray, 60)}",
        "start one, set RAY_AUTH_MODE=token if it asks for one, or give --ray local",
    ):
        ray.init(args.ray, logging_level="ERROR", log_to_driver=args.verbose, **local)
    resources = ray.cluster_resources()
    num_gpus = int(args.device != "cpu" and "GPU" in resources)
    cores = cores if local else int(resources["CPU"])
    args.threads = args.threads or (1 if num_gpus else max(1, cores // args.replicas))
    return ray, {"num_cpus": args.threads, "num_gpus": num_gpus}


def gathered(tasks: list[Task], args: argparse.Namespace) -> Iterator[Any]:
    """Answers of the replicas, each once, as they come. Raises `InputError`."""
    ray, share = connect(args)
    start = functools.partial(ray.remote(**share)(Replica).remote, args)
    groups = grouped(tasks, -(-len(tasks) // args.replicas))
    waiting = deque([line for _, line in group] for group in groups)
    log.info("%d prompts in %d groups, %d replicas", len(tasks), len(waiting), args.replicas)
    running: dict[Any, tuple[Any, dict[int, Line]]] = {}

    def give(replica: Any, group: list[Line]) -> None:
        stream = replica.answers.options(num_returns="streaming").remote(group)
        running[stream] = (replica, {line.number: line for line in group})

    num_deaths = 0
    for _ in range(args.replicas):
        give(start(), [])
    while waiting or any(group for _, group in running.values()):
        [stream], _ = ray.wait([*running], num_returns=1)
        replica, group = running[stream]
        try:
            answer = ray.get(next(stream))
            num_deaths = 0
            if group.pop(answer["line"], None):
                yield answer
            continue
        except StopIteration:
            if waiting:
                give(replica, waiting.popleft())
        except ray.exceptions.RayActorError as error:
            log.warning("a replica died, another one starts: %s", shorten(error))
            if (num_deaths := num_deaths + 1) == MOST_DEATHS:
                raise InputError(f"{num_deaths} replicas died in a row; see Ray's log") from None
            waiting.appendleft([*group.values()])
            give(start(), [])
        del running[stream]


class Replica:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._engine: Any = None

    def answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        """Answers lines; the first call reads the weights."""
        self._engine = self._engine or boot(self._args)
        yield from answers(self._engine, lines, self._args)
