"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line is an object with a `prompt` and whatever differs from the flags (`KNOWN`); an `id` comes
back in the answer. A text that ends is written at once as a line of JSON, as is an `error`. With
--output FILE the file of answers is the only state: what it answers is not asked again.

With --ray each replica is a Ray actor with an engine, and takes the next group of prompts, in
alphabetical order, when it is idle. Ray restarts a replica that dies, and gives it its group again.
Texts are coupled, so that a seed gives one text on every replica."""

import functools
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import minitri
from minitri import End, GenerationConfig, InputError, Request
from minitri.apps.cli import arguments, boot, documents, inputs
from minitri.apps.cli.report import Json, answer, json_line, progress_bar
from minitri.core.errors import explain, shorten
from minitri.core.fields import check_names
from minitri.core.settings import TEXT_FIELDS
from minitri.files.hf_config import without_null
from minitri.text.prompt_ids import as_seeds, draw_seed, next_seed

MAX_RESTARTS = 4  # of a replica, by Ray
MAX_GROUP = 16  # prompts of a replica, whose answers are written together
KNOWN = ("prompt", "id", "seed", *TEXT_FIELDS)
key_of = functools.partial(json.dumps, sort_keys=True)  # of an id, for a dictionary


class Line(NamedTuple):
    """A line, not empty, of the file of --prompts."""

    position: int  # among the lines that are not empty, from 0; added to the seed
    number: int  # in the file, from 1
    id: Any  # of JSON; by default the number
    fields: Json  # of the line's object, without the id and what is null
    problem: str  # why the line is no object of JSON, if it is none


def many(args: Namespace) -> int:
    """Answers the lines of --prompts that --output has not answered, here or by Ray replicas.
    Returns 0; raises `InputError` at the end if lines were wrong, or there are none."""
    lines = read_lines(args)
    name = args.output
    stdout = nullcontext(sys.stdout)
    with stdout if name is None else Path(name).open("a+", encoding="utf-8") as file:
        done = {} if name is None else answered(file.buffer, name)
        answer_all = answers if args.ray is None else on_replicas
        results = answer_all([line for line in lines if key_of(line.id) not in done], args)
        num_wrong = sum(done.values())
        for result in progress_bar(
            args, iterable=results, total=len(lines), initial=len(done), unit=" prompts"
        ):
            print(json_line(result), file=file, flush=True)
            num_wrong += "error" in result
    if num_wrong or not lines:
        raise InputError(f"{num_wrong} of {len(lines)} lines of --prompts are wrong; correct them")
    return 0


def answered(file: Any, name: str) -> dict[str, bool]:
    """Ids, as JSON, of the answers in an open --output file, and whether each is an error. Locks
    it, cuts off an incomplete last line. Raises `InputError` for a file of another kind."""
    import fcntl  # a module of Unix

    with explain(f"--output {shorten(name)} cannot be continued", "name another file"):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = file.seek(0, 2)  # 0 of a device, which may give bytes without end
        file.seek(0)
        *lines, last = file.read(size).split(b"\n")
        rows = map(json.loads, lines)
        done = {key_of(row["id"]): row["line"] > 0 and "error" in row for row in rows}
        if last.endswith(b"}") or not b'{"id": '.startswith(last[:7]):
            raise ValueError("its last line is no answer that was cut off")
        file.truncate(size - len(last))
    return done


def read_lines(args: Namespace) -> list[Line]:
    """The lines of --prompts that are not empty. Raises `InputError`."""
    lines: list[Line] = []
    keys = set()
    for number, text in enumerate(documents.read_text(args.prompts, "--prompts").split("\n"), 1):
        if text.strip(" \t\r"):
            fields = {}
            problem = ""
            try:
                fields = without_null({**json.loads(text)})
            except (TypeError, ValueError, RecursionError) as error:
                problem = f" ({shorten(error, 140)})"
            line = Line(len(lines), number, fields.pop("id", number), fields, problem)
            key = key_of(line.id)
            if args.output and key in keys:
                raise InputError(f"two lines of --prompts have the id {key}; give each its own")
            keys.add(key)
            lines.append(line)
    return lines


def answers(
    lines: Sequence[Line], args: Namespace, engine: "minitri.Engine | None" = None
) -> Iterator[Json]:
    """Yields JSON answers to lines of --prompts, each when done; by default loads the engine."""
    engine = engine or boot.load_engine(args)[0]
    generation = arguments.taken(GenerationConfig, args)
    sampling, seed = boot.sampling_of(args, engine, f"{len(lines)} prompts")
    heads = []
    requests = []
    for line in lines:
        head = {"id": line.id, "line": line.number}
        try:
            fields = {"seed": next_seed(seed, line.position), **line.fields}
            check_names(fields, KNOWN)
            [row_seed] = as_seeds(fields.pop("seed"), 1)
            if not isinstance(text := fields.pop("prompt", None), str):
                got = f"line {line.number} is no JSON object with a text as prompt{line.problem}"
                raise InputError(f'{got}; write such as {{"prompt": "Once"}}')
            request = Request(text, row_seed, sampling, generation, **fields)
            request.prompt = inputs.encode(text, engine, args, request.generation.max_new_tokens)
            requests.append(request)
            heads.append(head)
        except InputError as error:
            yield head | {"error": args.in_flags(error)}
    if requests:
        with boot.start_run(args, engine, requests) as run:
            for end in (event for event in run if isinstance(event, End)):
                yield heads[end.row] | answer(run.rows[end.row])


def on_replicas(lines: list[Line], args: Namespace) -> Iterator[Json]:
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

    def answers(self, lines: list[Line]) -> list[Json]:
        """Answers lines of --prompts; the first call reads the weights."""
        self.engine = self.engine or boot.load_engine(self.args)[0]
        return [*answers(lines, self.args, self.engine)]
