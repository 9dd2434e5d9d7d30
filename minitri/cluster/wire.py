"""HTTP/1.1 as the fleet's front reads and writes it: one request for a connection, whose bytes go
to a replica and come back as they are."""

import asyncio
import json
import re
from asyncio import IncompleteReadError, LimitOverrunError, StreamReader, StreamWriter
from contextlib import suppress

from minitri.serve.access import ApiError
from minitri.serve.answers import in_stream, to_json
from minitri.serve.app import BODY_SECONDS
from minitri.serve.connections import SECONDS

BLOCK = 128
"""Characters of a prompt, which a replica was given or not."""
MOST_BYTES = 1 << 23
"""Of a body; replicas take less."""
MOST_PARSED = 1 << 20
"""Bytes of a body whose prompt is looked at, so that no connection waits long for another."""
FIELDS = ("tools", "instructions", "prompt", "messages", "input")
"""Of a prompt, in the order in which a model reads them."""
LAST_CHUNK = b"0\r\n\r\n"
SILENCE = ApiError(503, "unavailable", "the replica does not answer any more; ask again")


async def read_request(reader: StreamReader, writer: StreamWriter) -> tuple[bytes, bytes]:
    """The request, which asks for a connection of its own, and its body alone. Raises `ApiError`,
    or `EOFError` if the client has left."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            if re.search(rb"(?i)\r\ntransfer-encoding[ \t]*:", head):
                message = "the body has no length; send Content-Length"
                raise ApiError(411, "invalid_request", message)
            size = re.search(rb"(?i)\r\ncontent-length:[ \t]*(\d{1,12})[ \t]*\r", head)
            num = int(size[1]) if size else 0
            if num > MOST_BYTES:
                message = f"the body has {num} bytes, the limit is {MOST_BYTES}; shorten the prompt"
                raise ApiError(413, "request_too_large", message)
            if re.search(rb"(?i)\r\nexpect:[ \t]*100-continue", head):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await reader.readexactly(num)
    except TimeoutError:
        message = f"the request was not there in {BODY_SECONDS} s; send it faster"
        raise ApiError(408, "request_timeout", message) from None
    except LimitOverrunError:
        raise ApiError(431, "invalid_request", "the headers are too long") from None
    head = re.sub(rb"(?i)\r\n(connection|expect):[^\r]*", b"", head)
    return head.replace(b"\r\n", b"\r\nconnection: close\r\n", 1) + body, body


async def left(reader: StreamReader) -> None:
    """Returns when a client has left; what else it sends is dropped."""
    with suppress(OSError):
        while await reader.read(1 << 12):
            pass


async def copy_answer(reader: StreamReader, writer: StreamWriter) -> bool:
    """Copies a replica's answer; a stream of events that breaks off ends with an error. False if
    nothing came, or `OSError` if the client does not read."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (OSError, IncompleteReadError, LimitOverrunError):
        return False
    await _send(writer, head)
    in_chunks = re.search(rb"(?i)\r\ntransfer-encoding:[ \t]*chunked", head)
    if in_chunks and re.search(rb"(?i)\r\ncontent-type:[ \t]*text/event-stream", head):
        part = b""
        while part != LAST_CHUNK:
            try:
                part = await _read_chunk(reader)
            except (OSError, IncompleteReadError, LimitOverrunError, ValueError):
                told = in_stream(to_json(SILENCE.content))
                part = LAST_CHUNK
                await _send(writer, b"%x\r\n%s\r\n" % (len(told), told))
            await _send(writer, part)
        return True
    while part := await reader.read(1 << 16):
        await _send(writer, part)
    return True


async def _read_chunk(reader: StreamReader) -> bytes:
    """With its frame."""
    size = await reader.readuntil(b"\r\n")
    return size + await reader.readexactly(int(size, 16) + 2)


async def _send(writer: StreamWriter, part: bytes) -> None:
    writer.write(part)
    try:
        async with asyncio.timeout(SECONDS):
            await writer.drain()
    except TimeoutError:  # it does not read
        writer.transport.abort()
        raise


def refusal(error: ApiError) -> bytes:
    """The answer to a request that no replica gets."""
    body = to_json(error.content)
    headers = error.headers | {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} Refused", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def blocks_of(body: bytes) -> list[int]:
    """A hash for each block of a prompt, which depends on those before it, too."""
    try:
        fields = {**json.loads(body if len(body) <= MOST_PARSED else b"")}
    except (TypeError, ValueError, RecursionError):  # the replica says what is wrong
        return []
    text = json.dumps([fields.get(name) for name in FIELDS])
    hashes = [0]
    for end in range(BLOCK, len(text) + 1, BLOCK):
        hashes.append(hash((hashes[-1], text[end - BLOCK : end])))
    return hashes[1:]
