"""HTTP endpoints as a Starlette application, and the uvicorn server that runs it.

A request that fails is answered with OpenAI's error JSON, and others do not notice. A client that
leaves frees its row."""

import asyncio
import contextlib
import hashlib
import os
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from minitri import End, Idle, InputError
from minitri.apps.cli.documents import MAX_BYTES
from minitri.apps.serve import metrics
from minitri.apps.serve.access import Access
from minitri.apps.serve.answers import ENDPOINTS, Writer
from minitri.apps.serve.chats.chat_body import FIELDS, ApiError
from minitri.apps.serve.page import page
from minitri.apps.serve.protocol import Call, Protocol, as_api_error
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.worker import NUM_TICKS, Job, Worker

SECONDS = 30  # for a client to send the headers of its first request, a body, or to read answers
WAITING_SECONDS = 15  # between signs of life of a stream that waits; proxies end silent ones at 60
COMPILERS = ThreadPoolExecutor(2)  # of grammars, for which nothing else waits
MOST_CONNECTIONS = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 128)  # 128 other files


class Answer(StreamingResponse):
    """Streamed HTTP response whose status is sent with its first piece, so an error can set it."""

    async def stream_response(self, send: Send) -> None:
        pieces: Any = self.body_iterator
        async with contextlib.aclosing(pieces):  # at once, if the client has left
            first = await anext(pieces)

            async def all_pieces() -> AsyncGenerator[bytes, None]:
                yield first
                async for piece in pieces:
                    yield piece

            self.body_iterator = all_pieces()
            await super().stream_response(send)


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """HTTP response that reports an error, in OpenAI's JSON."""
    refused = as_api_error(error)
    if isinstance(error, HTTPException):  # of Starlette: no such path, or method
        paths = ", ".join(route.path_format for route in request.app.routes)
        refused = ApiError(error.status_code, "invalid_request", f"{error.detail}; try {paths}")
    return JSONResponse(refused.content, refused.status, getattr(error, "headers", None))


async def read_body(request: Request, media_type: str, limit: int) -> bytes:
    """A request's body. Raises `ApiError` for one above `limit` bytes, or late, or of another type.
    Only programs may leave the type out: their requests have no Origin or Sec-Fetch-Site. A page of
    another site must ask (CORS) before it sends bodies of `media_type`."""
    sent = request.headers.get("content-type", "").lower()
    from_page = {"origin", "sec-fetch-site"} & {*request.headers}
    if sent.startswith("multipart/") or (from_page and not sent.startswith(media_type)):
        advice = f"send it alone, not in a form, as {media_type} (curl --data-binary @FILE)"
        raise ApiError(415, "unsupported_media_type", f"the body is {shorten(sent, 40)}; {advice}")
    body = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    got = f"the body has more than {limit} bytes; shorten the text"
                    raise ApiError(413, "request_too_large", got)
    except TimeoutError:
        raise ApiError(408, "request_timeout", "the body is late; send it faster") from None
    return bytes(body)


@dataclass
class Service:
    """HTTP endpoints of one model, with the clients that use them."""

    protocol: Protocol
    worker: Worker
    max_open: int  # texts that may run or wait
    access: Access
    clients: Counter[str] = field(default_factory=Counter)  # texts that run or wait, by client
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))  # of files
    readers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))  # of documents

    @property
    def app(self) -> Starlette:
        schemas = {path: kind.model_json_schema() for path, (kind, _) in ENDPOINTS.items()}
        routes = [
            *(Route(path, self.complete, methods=["POST"]) for path in ENDPOINTS),
            Route("/v1/documents", self.documents, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/", page("chat.html")),
            Route("/docs", page("docs.html")),
            Route("/docs.json", JSONResponse(schemas | FIELDS["docs"])),
        ]
        metrics.TEXTS.set_function(self.clients.total)
        sites = self.access.allow_origin
        cors = Middleware(CORSMiddleware, allow_origins=sites, allow_methods="*", allow_headers="*")
        handled = [ApiError, InputError, HTTPException, ClientDisconnect, Exception]
        handlers: Any = dict.fromkeys(handled, refuse)
        return Starlette(routes=routes, middleware=[cors], exception_handlers=handlers)

    def _admit(self, request: Request) -> str:
        """Name of the client of an allowed request: key's digest, or address. Raises `ApiError`."""
        access = self.access
        host = request.headers.get("host", "localhost")
        is_address = re.fullmatch(r"([\d.]+|\[.*\])(:\d+)?", host)  # which no other site can have
        names = ("localhost", access.host, *access.allowed_host)
        if not (is_address or host.partition(":")[0].lower() in names):
            raise ApiError(403, "forbidden", f"it is for {shorten(host, 60)}; see --allowed-host")
        if not access.digests:
            return request.client.host if request.client else ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode("latin-1")).hexdigest()
        if scheme.lower() != "bearer" or digest not in access.digests:
            raise ApiError(401, "invalid_api_key", "no valid key; send Authorization: Bearer KEY")
        return f"key {digest}"

    async def complete(self, request: Request) -> Response:
        """Answers a POST to a path of `ENDPOINTS`; until tokenized, it counts as one text."""
        client = self._admit(request)
        limit = max(1 << 16, 32 * self.protocol.context)  # 8 times what most texts that fit take
        body = await read_body(request, "application/json", limit)
        salt = client if self.access.digests and not self.access.share_prefixes else ""
        kind, make_writer = ENDPOINTS[request.url.path]
        with self._counted(client, 1):
            call = await asyncio.to_thread(self.protocol.read, body, kind, client, salt)
        writer = make_writer(call, self.protocol)
        media_type = "text/event-stream" if call.asked.stream else "application/json"
        return Answer(self._pieces(call, writer, client), media_type=media_type)

    async def _pieces(self, call: Call, writer: Writer, client: str) -> AsyncGenerator[bytes, None]:
        """Yields the answer to a call, piece by piece; cancels its texts if the client leaves.
        Raises `ApiError` before the first piece; a later error is the last piece."""
        started = time.monotonic()
        latest: dict[int, float] = {}  # see `metrics.note`
        has_begun = False
        outcome = "left"
        with self._counted(client, len(call.requests)):
            job = Job(call.requests)
            try:
                if call.requests[0].sampling.grammar or (call.chat and call.chat.functions):
                    compiling = COMPILERS.submit(self.protocol.compiled, call)
                    job.requests = [*await asyncio.wrap_future(compiling)]  # client gone: not begun
                self.worker.submit(job)
                async for event in job.events(WAITING_SECONDS):
                    metrics.note(event, started, latest)
                    index = 0 if isinstance(event, Idle) else job.numbers.index(event.row)
                    if isinstance(event, End):  # a whole answer, which can take a second
                        piece = await asyncio.to_thread(writer.take, index, event)
                        outcome = event.finish_reason
                    else:
                        piece = writer.take(index, event)
                    if piece:
                        has_begun = True
                        yield piece
            except Exception as error:
                refused = as_api_error(error)
                outcome = str(refused)
                if not has_begun:
                    raise refused from error
                yield writer.fail(refused.content)
            finally:
                job.is_cancelled = True
                log.info("%s: %s after %.1f s", writer.id, outcome, time.monotonic() - started)

    @contextlib.contextmanager
    def _counted(self, client: str, num: int) -> Iterator[None]:
        """Context in which a client has `num` texts more. Raises `ApiError` if too many."""
        share = self.max_open if self.access.is_for_one else max(1, self.max_open // 2)
        share = self.access.max_requests_per_client or share
        num_own = self.clients[client]
        num_open = self.clients.total()
        got = f"{num} texts are too many next to {num_open}, of which {num_own} are yours"
        message = f"{got} (at most {self.max_open}, and {share}); try later, or ask for less"
        if num_open + num > self.max_open:
            raise ApiError(503, "queue_full", message)
        if num_own + num > share:
            raise ApiError(429, "rate_limit_exceeded", message)
        self.clients[client] += num
        try:
            yield
        finally:
            self.clients -= Counter({client: num})

    async def documents(self, request: Request) -> Response:
        """Answers with text, format and number of tokens of a file, of any type that chats read."""
        client = self._admit(request)
        with self._counted(client, 1):
            async with self.uploads:
                body = await read_body(request, "application/octet-stream", MAX_BYTES)
            async with self.readers:
                read = await asyncio.to_thread(self.protocol.document, body)
        return Response(read, media_type="application/json")

    async def models(self, request: Request) -> Response:
        """Lists all names of the model, or describes the one in the path, as OpenAI's API does."""
        self._admit(request)
        if name := request.path_params.get("name"):
            return JSONResponse(self.protocol.model(name))
        models = [self.protocol.model(name) for name in self.protocol.names]
        return JSONResponse({"object": "list", "data": models})

    async def metrics(self, request: Request) -> Response:
        """Answers with counts and seconds, see metrics.py, as Prometheus reads them."""
        self._admit(request)
        return Response(generate_latest(), media_type="text/plain; version=0.0.4")

    async def health(self, _: Request) -> Response:
        why = self.worker.problem
        content = {"status": why or "ok", "requests": self.clients.total()}
        return JSONResponse(content, 503 if why else 200)


class Connection(H11Protocol):
    """A uvicorn connection with limits on how many are open, and on the time to send or read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            others: Any = self.connections - {self}
            idle = (each for each in others if not (each.cycle or each.transport.is_closing()))
            next(idle, self).transport.abort()
        self.timeout_keep_alive_task = self.loop.call_later(SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads data; the connection's time limit runs until all headers have come.
        uvicorn's own method ends that limit at the first byte."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()


class Server(uvicorn.Server):
    """HTTP server. Requests fail `grace` s after Ctrl-C, or `stall_seconds` without progress."""

    def __init__(self, service: Service, grace: float, stall_seconds: float) -> None:
        config = uvicorn.Config(
            service.app, http=Connection, log_config=None, access_log=False, proxy_headers=False
        )
        super().__init__(config)
        self._worker = service.worker
        self._grace = grace
        self._ticks = round(10 * stall_seconds / NUM_TICKS)  # of 0.1 s

    def handle_exit(self, *_: Any) -> None:
        if self.should_exit:
            log.info("stopped")
            os._exit(0)  # whatever still runs
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % self._ticks == 0:
            self._worker.tick()
        return await super().on_tick(counter)

    async def shutdown(self, *sockets: Any, **by_name: Any) -> None:
        log.info("finishing requests; again to stop now")
        why = "the server is stopping; ask again later"
        asyncio.get_running_loop().call_later(self._grace, self._worker.give_up, why)
        timer = threading.Timer(self._grace + 2, self.handle_exit)  # even if the model is stuck
        timer.daemon = True
        timer.start()
        await super().shutdown(*sockets, **by_name)
