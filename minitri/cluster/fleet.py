"""Servers that Ray starts, behind one address: `minitri serve --ray ADDRESS --replicas 1:4`.

Each is a task, in whose process the server listens at a port of its own. A connection is for one
request, whose bytes go to the replica that was last given the longest beginning of its prompt,
unless another has less to do. Once a second the fleet compares what is there with what is wanted:
as many as requests need, and after SIGUSR1 new ones in the place of all, one at a time.
"""

import argparse
import asyncio
import errno
import logging
import os
import re
import signal
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from minitri.cluster.connection import connect
from minitri.cluster.wire import SILENCE, blocks_of, copy_answer, left, read_request, refusal
from minitri.errors import InputError, explain, shorten
from minitri.log import log
from minitri.serve.access import KEY_VARIABLE, ApiError
from minitri.serve.connections import most_connections
from minitri.settings import MAX_ROWS

MOST_BLOCKS = 1 << 18
"""That are remembered, in 50 MB."""
SILENT_SECONDS = 8
"""After which a replica is dead."""
LEAVING_SECONDS = 2
"""For a client to send what nobody reads any more, before it sees why."""
IDLE_SECONDS = 60
"""With fewer requests than replicas can run, after which one of them ends."""
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
Serve = Callable[[argparse.Namespace, socket.socket], None]


def run_fleet(args: argparse.Namespace, listener: socket.socket, serve: Serve) -> None:
    """Answers requests until Ctrl-C by replicas that `serve`. Raises `InputError`."""
    bounds = re.fullmatch(r"([1-9]\d{0,3})(?::([1-9]\d{0,3}))?", args.replicas)
    if not bounds or int(bounds[1]) > int(bounds[2] or bounds[1]):
        raise InputError(f"--replicas is {shorten(args.replicas, 60)}; give N, or MIN:MAX")
    args.replicas = int(bounds[2] or bounds[1])
    ray, share = connect(args)
    here = vars(args)
    for name in ("model", "draft", "api_key_file", "kv_store"):  # in the folder of this program
        if here[name] is not None and Path(here[name]).exists():
            here[name] = str(Path(here[name]).absolute())
    args.api_key = os.environ.get(KEY_VARIABLE) if args.api_key is None else args.api_key
    options = {"num_returns": "streaming", "max_retries": 0, "max_calls": 1}
    task = ray.remote(**share, **options)(serve_alone)
    fleet = Fleet(args.batch_size or MAX_ROWS, int(bounds[1]), args.replicas)
    log.info("replicas start for http://%s:%d/v1; Ctrl-C ends", *listener.getsockname())
    asyncio.run(fleet.run(listener, args.grace, lambda: task.remote(args, serve), ray.cancel))
    log.info("stopped")


def serve_alone(args: argparse.Namespace, serve: Serve) -> Iterator[tuple[str, int]]:
    """Serves in a process of its own, after it has told where."""
    import ray

    host = "127.0.0.1" if args.ray == "local" else ray.util.get_node_ip_address()
    args.ray = None
    os.environ.pop(KEY_VARIABLE, None)  # the cluster's, which is not for this server
    logging.basicConfig(level="INFO", format="%(message)s")  # in Ray's log of this process
    with socket.create_server((host, 0)) as listener:
        yield listener.getsockname()
        serve(args, listener)


class Replica:
    """A server from its start to its end."""

    def __init__(self) -> None:
        self.address: Any = None  # once it is ready
        self.connections = set[StreamWriter]()  # one for each request
        self.is_old = False
        self.is_wanted = True
        self.watch: asyncio.Task[None] | None = None

    async def answer(self, request: bytes, client: asyncio.Task[None], out: StreamWriter) -> bool:
        """Copies an answer until it ends, the client has left, or the replica dies. False: there
        was none."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                reader, upstream = await asyncio.open_connection(*self.address)
        except OSError:
            return False
        self.connections.add(upstream)
        client.add_done_callback(lambda _: upstream.transport.abort())
        try:
            upstream.write(request)
            return await copy_answer(reader, out)
        finally:
            self.connections.discard(upstream)
            upstream.transport.abort()


class Fleet:
    """As many replicas as are wanted."""

    def __init__(self, num_rows: int, least: int, most: int) -> None:
        """Each runs `num_rows` requests at a time."""
        self.replicas: list[Replica] = []
        self._num_rows = num_rows
        self._least = least
        self._most = most
        self._num_wanted = least
        self._busy_at = 0.0  # when all were needed
        self._given: dict[int, Replica] = {}  # by blocks, of which those used last are at the end
        self._failure: BaseException | None = None
        self._was_ready = False  # one of the replicas
        self._num_open = 0  # connections of clients

    async def run(self, listener: socket.socket, grace: float, start: Any, cancel: Any) -> None:
        """Answers until SIGINT or SIGTERM by tasks that `start` gives. Raises `InputError` if no
        replica can start."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        loop.add_signal_handler(signal.SIGUSR1, self.renew)
        server = await asyncio.start_server(self.serve, sock=listener)
        while not ended.is_set():
            for _ in range(self.adapt(loop.time())):
                self.replicas.append(replica := Replica())
                replica.watch = loop.create_task(self._watch(replica, start(), cancel))
            await asyncio.sleep(1)
            if self._failure and not self._was_ready:
                with explain("no replica can start", "see Ray's log"):
                    raise self._failure
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second one ends all at once
        server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while any(it.connections for it in self.replicas):
                    await asyncio.sleep(0.1)

    def renew(self) -> None:
        """Replaces all replicas, one at a time."""
        log.info("a new replica takes the place of each")
        for replica in self.replicas:
            replica.is_old = True

    def adapt(self, now: float) -> int:
        """One step to what is wanted: how many replicas to start; one of those that are there may
        not be wanted any more. While they are replaced, there is one more."""
        staying = [it for it in self.replicas if it.is_wanted]
        num_needed = -(-sum(len(it.connections) for it in staying) // self._num_rows)
        num_needed = min(max(num_needed, self._least), self._most)
        if num_needed >= self._num_wanted or now > self._busy_at + IDLE_SECONDS:
            self._num_wanted = max(num_needed, self._num_wanted - 1)
            self._busy_at = now
        is_renewing = any(it.is_old for it in staying)
        starting = [it for it in staying if not it.address]
        if len(staying) - is_renewing * bool(starting) > self._num_wanted:
            least = min(starting or staying, key=lambda it: (not it.is_old, len(it.connections)))
            least.is_wanted = False
            return 0
        return self._num_wanted + is_renewing - len(staying)

    async def _watch(self, replica: Replica, stream: Any, cancel: Any) -> None:
        """A replica from its start to its end."""
        is_let_go = False
        try:
            told = asyncio.ensure_future(anext(stream))
            while not (await asyncio.wait([told], timeout=1))[0]:
                if not replica.is_wanted:  # while there is no room for it
                    is_let_go = True
                    cancel(stream, force=True)
            address = await (await told)
            with suppress(OSError):
                while replica.is_wanted or replica.connections:
                    await check(address, SILENT_SECONDS if replica.address else None)
                    if not replica.address:
                        log.info("a replica is ready at %s:%d", *address)
                        self._was_ready = True
                    replica.address = address
                    await asyncio.sleep(1)
            if replica.address:
                if replica.is_wanted:
                    log.warning("the replica at %s:%d has died; another one starts", *address)
                cancel(stream, force=replica.is_wanted)  # else as by Ctrl-C
            replica.is_wanted = False
            for upstream in replica.connections:
                upstream.transport.abort()
            await (await anext(stream))
        except Exception as error:  # Ray's, or of the replica
            if not (replica.address or is_let_go):
                self._failure = getattr(error, "cause", error)
                log.warning("a replica did not start: %s", shorten(self._failure))
        self.replicas.remove(replica)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answers the request of a connection."""
        self._num_open += 1
        try:
            with closing(writer), suppress(OSError, EOFError):
                try:
                    await self._answer(reader, writer)
                except ApiError as error:
                    writer.write(refusal(error))
                    writer.write_eof()
                    async with asyncio.timeout(LEAVING_SECONDS):
                        await left(reader)
        finally:
            self._num_open -= 1

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Raises `ApiError` where no replica does."""
        if self._num_open > most_connections() // 2:  # each needs another one
            raise ApiError(503, "queue_full", "there are too many connections; try later")
        request, body = await read_request(reader, writer)
        client = asyncio.create_task(left(reader))
        blocks = blocks_of(body)
        tried: list[Replica] = []
        try:
            while not client.done() and (replica := self._choose(blocks, tried)):
                if await replica.answer(request, client, writer):
                    return
                tried.append(replica)
            if not client.done():
                raise SILENCE
        finally:
            client.cancel()
            await asyncio.wait([client])

    def _choose(self, blocks: list[int], tried: list[Replica]) -> Replica | None:
        """The replica for a prompt, which from now on was given its blocks; None if all are dead,
        or three have died, perhaps by this request."""
        usable = [it for it in self.replicas if it.address and it.is_wanted and it not in tried]
        if not usable or len(tried) == 3:
            return None
        least = min(usable, key=lambda it: len(it.connections))
        given = (self._given.get(block) for block in reversed(blocks))
        chosen = next((it for it in given if it in usable), least)
        if len(chosen.connections) > len(least.connections) + self._num_rows:
            chosen = least
        for block in blocks:
            self._given.pop(block, None)
            self._given[block] = chosen
        while len(self._given) > MOST_BLOCKS:
            del self._given[next(iter(self._given))]
        return chosen


async def check(address: tuple[str, int], seconds: float | None) -> None:
    """Raises `OSError` if a server is dead, or silent or stuck for so long."""
    async with asyncio.timeout(seconds):
        try:
            reader, writer = await asyncio.open_connection(*address)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # here, which says nothing of it
                return
            raise
        with closing(writer):
            writer.write(HEALTH)
            if b" 200 " not in await reader.readline():
                raise ConnectionError
