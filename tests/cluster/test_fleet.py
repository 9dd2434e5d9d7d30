"""Which replica a request goes to, and what its client sees of those that die: all without Ray."""

import asyncio
import contextlib
import json
import socket

import pytest

from minitri.cluster.fleet import IDLE_SECONDS, Fleet, Replica
from minitri.cluster.wire import BLOCK, blocks_of
from minitri.errors import InputError
from minitri.serve.__main__ import main
from tests.cluster.conftest import documents

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = b"5\r\nhello\r\n0\r\n\r\n"


class FakeServer:
    """Answers with these parts, `None` being its death, and keeps what it was asked."""

    def __init__(self, *parts: bytes | None):
        self.parts = parts
        self.asked: list[bytes] = []
        self.replica = Replica()
        self.was_left = asyncio.Event()

    async def __call__(self, reader, writer):
        with contextlib.closing(writer):
            await self.answer(reader, writer)

    async def answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0] or 0)
        self.asked.append(head + await reader.readexactly(size))
        for part in self.parts:
            if part is None:
                writer.transport.abort()
                return
            writer.write(part)
        is_done = self.parts and self.parts[-1].endswith(b"0\r\n\r\n")
        if not is_done and await reader.read(1) == b"":
            self.was_left.set()


class Deaf(FakeServer):
    """Reads no body, and pauses between the parts of its answer."""

    async def answer(self, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for part in self.parts:
            if part is None:
                writer.transport.abort()
                return
            writer.write(part)
            await asyncio.sleep(0.05)


def run(test):
    """Runs a test of `asyncio`, which has 20 s."""
    return asyncio.run(asyncio.wait_for(test(), 20))


@contextlib.asynccontextmanager
async def fleet_of(*servers: FakeServer, num_rows=2):
    """A fleet's address, and the fleet."""
    fleet = Fleet(num_rows, 1, 9)
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            there = await stack.enter_async_context(await asyncio.start_server(server, "127.0.0.1"))
            server.replica.address = there.sockets[0].getsockname()
            fleet.replicas.append(server.replica)
        front = await stack.enter_async_context(
            await asyncio.start_server(fleet.serve, "127.0.0.1")
        )
        yield fleet, front.sockets[0].getsockname()
    await asyncio.sleep(0.05)  # for connections to be closed


@contextlib.asynccontextmanager
async def asking(address, prompt="x", **fields):
    """A connection on which a request was sent."""
    body = json.dumps({"seed": 1, "prompt": prompt, **fields}).encode()
    reader, writer = await asyncio.open_connection(*address)
    size = b"content-length: %d\r\nConnection: keep-alive\r\n\r\n" % len(body)
    writer.write(
        b"POST /v1/completions?a=b HTTP/1.1\r\nhost: x\r\nAuthorization: Bearer k\r\n" + size
    )
    writer.write(body)
    try:
        yield reader
    finally:
        writer.close()


async def ask(address, prompt="x", **fields) -> bytes:
    async with asking(address, prompt, **fields) as reader:
        return await reader.read()


def test_bytes_go_through_as_they_are_but_for_the_connection():
    async def test():
        server = FakeServer(HEAD, ANSWER)
        async with fleet_of(server) as (_, address):
            assert await ask(address, "é") == HEAD + ANSWER
        [asked] = server.asked
        head, body = asked.split(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions?a=b HTTP/1.1\r\nconnection: close\r\n")
        assert b"\r\nAuthorization: Bearer k\r\n" in head
        assert b"keep-alive" not in head
        assert json.loads(body)["prompt"] == "é"
        assert not server.replica.connections

    run(test)


def test_the_replica_that_knows_the_longest_beginning_is_asked():
    """Also of messages, and wherever the other fields of the body stand."""

    async def test():
        servers = [FakeServer(HEAD, ANSWER) for _ in range(3)]
        one, other = documents(2)
        async with fleet_of(*servers) as (fleet, address):
            for prompt, server in ((one, servers[2]), (other, servers[1])):
                fleet._given |= dict.fromkeys(
                    blocks_of(json.dumps({"prompt": prompt}).encode()), server.replica
                )
            for i in range(4):
                await ask(address, one + str(i), temperature=i)
                await ask(address, other + str(i), user="u")
            half = one[: len(one) // 2] + other
            await ask(address, half)
            await ask(address, half)
            first = [{"role": "user", "content": one}]
            await ask(address, None, messages=first)
            [after] = [it for it in servers if it.asked[-1:] and b'"messages"' in it.asked[-1]]
            count = len(after.asked)
            await ask(address, None, messages=[*first, {"role": "assistant", "content": "yes"}])
            assert len(after.asked) == count + 1
        assert len([it for it in servers[2].asked if b'"prompt": null' not in it]) == 6
        assert len([it for it in servers[1].asked if b'"prompt": null' not in it]) == 4

    run(test)


def test_one_that_has_much_more_to_do_is_left_alone():
    """By more requests than it runs at a time."""

    async def test():
        servers = [FakeServer(HEAD), FakeServer(HEAD)]
        async with (
            fleet_of(*servers, num_rows=2) as (_, address),
            contextlib.AsyncExitStack() as all_,
        ):
            for i in range(7):
                reader = await all_.enter_async_context(asking(address, documents(1)[0] + str(i)))
                await reader.readexactly(len(HEAD))
                counts = [len(it.asked) for it in servers]
                assert counts in ([min(i + 1, 3), max(0, i - 2)], counts[::-1])
            assert sorted(counts) == [3, 4]

    run(test)


@pytest.mark.parametrize("dying", [(None,), "gone"])
def test_a_request_without_an_answer_goes_to_another_replica(dying):
    async def test():
        dead = FakeServer(*(dying if dying != "gone" else ()))
        living = FakeServer(HEAD, ANSWER)
        async with fleet_of(dead, living) as (fleet, address):
            if dying == "gone":
                dead.replica.address = ("127.0.0.1", 1)
            fleet._given |= dict.fromkeys(
                blocks_of(json.dumps({"prompt": "y" * 300}).encode()), dead.replica
            )
            assert await ask(address, "y" * 300) == HEAD + ANSWER
        assert len(dead.asked) == (dying != "gone")

    run(test)


def test_a_stream_that_had_begun_ends_with_an_error():
    async def test():
        async with fleet_of(FakeServer(HEAD, b"5\r\nhello\r\n", None)) as (_, address):
            told = await ask(address)
        assert told.startswith(HEAD + b"5\r\nhello\r\n")
        size, event, *end = told.removeprefix(HEAD + b"5\r\nhello\r\n").split(b"\r\n")
        assert end == [b"0", b"", b""]
        assert int(size, 16) == len(event)
        error = json.loads(event.removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert "ask again" in error["message"]

    run(test)


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        ((HEAD[:20], HEAD[20:], b"5\r\nhello\r\n", None), b"event"),
        ((HEAD, b"5\r\nhello\r\n50\r\nhalf of", None), b"event"),
        ((HEAD, b"5\r\nhello\r\n", b"0\r\n", b"\r\n"), b"5\r\nhello\r\n0\r\n\r\n"),
        ((HEAD, b"5\r\nhello\r\n", b"0\r\n\r\n"), b"5\r\nhello\r\n0\r\n\r\n"),
        ((b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", b"x", None), b"\r\n\r\nx"),
        ((b"HTTP/1.1 200 OK\r\n\r\n", b"text/event-stream", None), b"\r\n\r\ntext/event-stream"),
    ],
)
def test_only_streams_that_break_off_end_with_an_error(parts, end):
    """However their bytes arrive; whatever stands in an answer."""

    async def test():
        async with fleet_of(Deaf(*parts)) as (_, address):
            told = await ask(address)
        if end == b"event":
            size, event, *last = told.removeprefix(HEAD + b"5\r\nhello\r\n").split(b"\r\n")
            assert (int(size, 16), last) == (len(event), [b"0", b"", b""])
            assert b"ask again" in event
        else:
            assert told.endswith(end)
            assert b"ask again" not in told

    run(test)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Transfer-Encoding: chunked", b"411"),
        (b"Content-Length: 99999999999", b"413"),
        (b"Content-Length: " + b"1" * 5000, b"200"),  # a replica would refuse it
        (b"x: " + b"a" * (1 << 17), b"431"),
    ],
)
def test_what_no_replica_can_take_is_refused(head, status):
    async def test():
        async with fleet_of(Deaf(b"HTTP/1.1 200 OK\r\n\r\n", None)) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            body = b"x" * (1 << 20)  # which nobody reads
            writer.write(b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\n" + body)
            assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
            writer.close()

    run(test)


def test_what_follows_a_request_is_no_leaving_and_a_client_is_told_to_go_on():
    async def test():
        async with fleet_of(FakeServer(HEAD, ANSWER)) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"{}\r\nGET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == HEAD + ANSWER
            writer.close()

    run(test)


def test_a_client_that_leaves_closes_the_connection_to_the_replica():
    """Before its answer begins, and in the middle of it."""

    async def test():
        for parts in ((), (HEAD,)):
            server = FakeServer(*parts)
            async with fleet_of(server) as (_, address):
                async with asking(address) as reader:
                    while not server.replica.connections:
                        await asyncio.sleep(0.01)
                    if parts:
                        await reader.readexactly(len(HEAD))
                await server.was_left.wait()
                await asyncio.sleep(0.05)
                assert not server.replica.connections

    run(test)


@pytest.mark.parametrize("num_dead", [0, 1, 4])
def test_where_no_replica_answers_the_client_may_ask_again(num_dead):
    """A request that they die of does not kill more than three."""

    async def test():
        servers = [FakeServer(None) for _ in range(num_dead)]
        async with fleet_of(*servers) as (_, address):
            told = await ask(address)
        assert told.startswith(b"HTTP/1.1 503 ")
        error = json.loads(told.partition(b"\r\n\r\n")[2])["error"]
        assert (error["code"], "ask again" in error["message"]) == ("unavailable", True)
        assert sum(len(it.asked) for it in servers) == min(num_dead, 3)

    run(test)


def test_what_is_no_request_gets_no_answer_and_stops_nothing():
    async def test():
        server = FakeServer(HEAD, ANSWER)
        async with fleet_of(server) as (_, address):
            for junk in (
                b"",
                b"GET",
                b"x\r\nContent-Length: 5\r\n\r\nab",
            ):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(junk)
                with contextlib.suppress(OSError):
                    writer.write_eof()
                    assert await reader.read() == b""
                writer.close()
            assert not server.asked
            assert await ask(address) == HEAD + ANSWER

    run(test)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"prompt": "short"}'])
def test_a_body_without_a_prompt_has_no_blocks(body):
    assert blocks_of(body) == []


def test_blocks_depend_on_all_before_them():
    one, other = ([*blocks_of(json.dumps({"prompt": it + "b" * 500}).encode())] for it in "ac")
    assert len(one) == len(other) == (500 + len('[null, null, "a", null, null]') - 1) // BLOCK
    assert not {*one} & {*other}


def replica_with(num: int) -> Replica:
    made = Replica()
    made.address = ("127.0.0.1", 1)
    made.connections = {object() for _ in range(num)}
    return made


def test_there_are_as_many_replicas_as_requests_need():
    fleet = Fleet(4, 1, 3)
    assert fleet.adapt(0) == 1
    fleet.replicas = [replica_with(4)]
    assert fleet.adapt(1) == 0
    fleet.replicas = [replica_with(5)]
    assert fleet.adapt(2) == 1
    fleet.replicas = [replica_with(50)]
    assert fleet.adapt(3) == 2
    fleet.replicas = [replica_with(1), replica_with(0), replica_with(1)]
    assert fleet.adapt(3 + IDLE_SECONDS) == 0
    assert all(it.is_wanted for it in fleet.replicas)
    assert fleet.adapt(4 + IDLE_SECONDS) == 0
    assert [it.is_wanted for it in fleet.replicas] == [True, False, True]
    fleet.adapt(5 + IDLE_SECONDS)
    assert [it.is_wanted for it in fleet.replicas] == [True, False, True]
    fleet.adapt(5 + 2 * IDLE_SECONDS)
    assert sum(it.is_wanted for it in fleet.replicas) == 1


def test_one_that_gets_no_room_is_let_go_first():
    fleet = Fleet(1, 1, 4)
    fleet.replicas = [replica_with(2), replica_with(2)]
    assert fleet.adapt(0) == 2
    fleet.replicas = [replica_with(0), replica_with(0), Replica(), Replica()]
    for n in (1, 2, 3, 4, 5, 6):
        fleet.adapt(n * (IDLE_SECONDS + 1))
    assert [it.is_wanted for it in fleet.replicas].count(True) == 1
    assert not any(it.is_wanted for it in fleet.replicas[2:])


def test_replicas_are_replaced_one_at_a_time():
    fleet = Fleet(4, 2, 2)
    old = fleet.replicas = [replica_with(1), replica_with(2)]
    fleet.renew()
    new = []
    for _ in range(2):
        assert fleet.adapt(0) == 1
        new.append(Replica())
        fleet.replicas = [*fleet.replicas, new[-1]]
        assert fleet.adapt(0) == 0  # it is not ready
        assert sum(it.is_wanted for it in fleet.replicas) == 3
        new[-1].address = ("127.0.0.1", 1)
        assert fleet.adapt(0) == 0
        assert sum(it.is_wanted for it in old) == 2 - len(new)
    assert fleet.adapt(0) == 0
    assert [it.is_wanted for it in fleet.replicas] == [False, False, True, True]


class FakeStream:
    """What Ray tells of a replica: its address, and how it ended."""

    def __init__(self, *told):
        self.told = [*told]

    async def __anext__(self):
        async def get():
            if isinstance(value, Exception):
                raise value
            return value

        if not self.told:
            raise StopAsyncIteration
        value = self.told.pop(0)
        return get()


@pytest.mark.parametrize("status", [b"200 OK", b"503 Unavailable"])
def test_a_replica_is_ready_when_it_answers_and_dead_when_it_does_not(status):
    async def test():
        cancelled = []
        server = FakeServer(b"HTTP/1.1 200 OK\r\n\r\n")
        async with fleet_of(server) as (fleet, _):
            address, server.replica.address = server.replica.address, None
            stream = FakeStream(address)
            cancel = lambda *given, force: cancelled.append((*given, force))  # noqa: E731
            watch = asyncio.create_task(fleet._watch(server.replica, stream, cancel))
            while not server.replica.address:
                await asyncio.sleep(0.01)
            if status.startswith(b"200"):
                server.replica.is_wanted = False
            else:
                server.parts = (b"HTTP/1.1 " + status,)
            await watch
            assert not fleet.replicas
        assert cancelled == [(stream, status.startswith(b"503"))]

    run(test)


def test_the_program_ends_if_no_replica_can_start():
    """With what was raised there, not with Ray's traceback."""

    async def test():
        error = RuntimeError("a traceback")
        error.cause = InputError("there is no such model")
        listener = socket.create_server(("127.0.0.1", 0))
        start = lambda: FakeStream(("127.0.0.1", 1), error)  # noqa: E731
        with pytest.raises(InputError, match="^there is no such model$"):
            await Fleet(1, 2, 2).run(listener, 1, start, None)
        listener.close()

    run(test)


def test_a_start_that_fails_later_ends_nothing():
    async def test():
        server = FakeServer(b"HTTP/1.1 200 OK\r\n\r\n0\r\n\r\n")
        async with fleet_of(server) as (fleet, _):
            address, fleet.replicas = server.replica.address, []
            told = iter([FakeStream(address), *(FakeStream(OSError("full")) for _ in range(9))])
            start, cancel = (lambda: next(told)), (lambda *_, force: None)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                running = asyncio.create_task(fleet.run(listener, 1, start, cancel))
                while not (fleet.replicas and fleet.replicas[0].address):
                    await asyncio.sleep(0.01)
                server.parts = (b"HTTP/1.1 503 Unavailable\r\n\r\n0\r\n\r\n",)
                await asyncio.sleep(3.5)
                assert not running.done()
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    run(test)


@pytest.mark.parametrize("bounds", ["0", "3:2", "x", "1:", "-1", "2:3:4", "99999"])
def test_wrong_numbers_of_replicas_are_one_line(call, bounds):
    done = call(main, "--port", 0, "--ray", "local", f"--replicas={bounds}")
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "give N, or MIN:MAX" in done.err


def test_without_ray_a_line_says_what_to_install(call, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    done = call(main, "--port", 0, "--ray", "local")
    assert (done.code, done.out) == (2, "")
    assert done.err == "minitri: --ray needs Ray; install it: pip install 'minitri[ray]'\n"


def test_replicas_without_ray_are_refused(call):
    done = call(main, "--port", 0, "--replicas", "3")
    assert (done.code, done.err) == (
        2,
        "minitri: --replicas needs --ray; give --ray local, or leave it out\n",
    )
