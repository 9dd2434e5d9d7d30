"""Many prompts on many engines: `generate --prompts FILE --ray ADDRESS --output FILE`.

Each replica is an actor with an engine. Prompts that begin alike are a group, whose beginning one
replica reads once; an idle replica takes the longest group left. What a dead one's group still
lacks is given again, and another one starts.

The file of answers is all the state there is: an id that it holds is done. Texts are coupled: a
seed writes the same one on every replica.
"""

import argparse
import fcntl
import functools
import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from minitri import InputError
from minitri.apps.cli.boot import boot
from minitri.apps.cli.jsonl import Line, answers, check_wrong, read_lines
from minitri.apps.cluster.connection import connect
from minitri.core.errors import explain, shorten
from minitri.core.log import log
from minitri.text.prompt_ids import draw_seed

Asked = tuple[str, Line]  # a prompt, and the line that it is of
key_of = functools.partial(json.dumps, sort_keys=True)
"""An id as one that can be compared."""
MOST_DEATHS = 5
"""Of replicas, one after the other, without an answer."""


def run_on_replicas(args: argparse.Namespace, *configs: Any) -> None:
    """Answers the lines of --prompts to which --output has no answer. Raises `InputError`."""
    if args.output is None or args.save_kv is not None:
        raise InputError("--ray needs --output FILE for the answers, and has no --save-kv")
    asked: dict[str, Asked] = {}
    for line in read_lines(args):
        key, prompt = understood(line)
        if asked.setdefault(key, (prompt, line)) != (prompt, line):
            raise InputError(f"two lines of --prompts have the id {key}; give each its own")
    args.seed = draw_seed() if args.seed is None else args.seed
    counts = Counter[str]()
    with Path(args.output).open("ab+") as file:
        with explain(f"--output {shorten(args.output)} cannot be continued", "name another file"):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = answered(file)
        told = gathered([it for key, it in asked.items() if key not in done], args, *configs)
        for it in tqdm(told, total=len(asked), initial=len(done), disable=args.quiet or None):
            written = json.dumps(it, ensure_ascii=False).encode("utf-8", "surrogatepass")
            file.write(written + b"\n")
            file.flush()
            done[key_of(it["id"])] = "error" in it
            counts.update({name: num for name, num in it.items() if name.startswith("num_")})
    num, num_cached = (counts[f"num_{name}_tokens"] for name in ("prompt", "cached"))
    log.info("%d answers; of %d tokens of new prompts %d were cached", len(done), num, num_cached)
    check_wrong(args, sum(done.values()), len(asked))


def understood(line: Line) -> tuple[str, str]:
    """The id and the prompt of a line, if it is JSON; a replica says what is wrong with it."""
    try:
        fields = {**json.loads(line[2])}
    except (TypeError, ValueError, RecursionError):
        fields = {}
    return key_of(fields.get("id", line[1])), str(fields.get("prompt"))


def answered(file: IO[bytes]) -> dict[str, bool]:
    """Ids in a file of answers, and whether those are errors. Cuts off a last line that is torn.
    Raises `ValueError` or the like if it holds something else, which stays as it is."""
    file.seek(0)
    *lines, torn = file.read().split(b"\n")
    done = {key_of(it["id"]): it["line"] > 0 and "error" in it for it in map(json.loads, lines)}
    with suppress(ValueError):
        json.loads(torn)
        torn = b"whole"
    if torn[:7] != b'{"id": '[: len(torn)]:
        raise ValueError("its last line is no answer that was cut off")
    file.truncate(file.tell() - len(torn))
    return done


def grouped(asked: Iterable[Asked], most: int) -> list[list[Asked]]:
    """Those of which each begins as another one, for half of its length at least; the longest group
    first. None has more than `most`, so that every replica has work."""
    groups: list[list[Asked]] = []
    for prompt, line in sorted(asked):
        before = groups[-1][-1][0] if groups else ""
        num = min(len(before), len(prompt)) // 2
        if not groups or before[:num] != prompt[:num] or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append((prompt, line))
    return sorted(groups, key=lambda group: -sum(len(prompt) for prompt, _ in group))


def gathered(asked: list[Asked], args: argparse.Namespace, *configs: Any) -> Iterator[Any]:
    """The answers of replicas, each once, as they come. Raises `InputError`."""
    ray, share = connect(args)
    start = functools.partial(ray.remote(**share)(Replica).remote, args, *configs)
    groups = grouped(asked, -(-len(asked) // args.replicas))
    waiting = deque([line for _, line in group] for group in groups)
    log.info("%d prompts in %d groups, %d replicas", len(asked), len(waiting), args.replicas)
    running: dict[Any, tuple[Any, dict[int, Line]]] = {}

    def give(replica: Any, group: list[Line]) -> None:
        stream = replica.answers.options(num_returns="streaming").remote(group)
        running[stream] = (replica, {line[1]: line for line in group})

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

    def __init__(self, *settings: Any) -> None:
        self._settings = settings
        self._engine: Any = None

    def answers(self, lines: list[Line]) -> Iterator[dict[str, Any]]:
        """Those to lines; the first call reads the weights."""
        self._engine = self._engine or boot(self._settings[0])
        yield from answers(self._engine, lines, *self._settings)
