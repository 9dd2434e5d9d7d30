"""HTTP endpoints as a Starlette application, and the uvicorn server that runs it.

A request that fails is answered with OpenAI's error JSON, and others do not notice. A client that
leaves frees its row.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minitri import End, Idle, InputError
from minitri.apps.serve.access import Access
from minitri.apps.serve.answers import Writer
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.completion import (
    ChatBody,
    DetokenizeBody,
    Fields,
    ForModel,
    TextBody,
    TokenizeBody,
)
from minitri.apps.serve.bodies.response_body import ResponseBody
from minitri.apps.serve.bodies.strict_json import Json
from minitri.apps.serve.connections import Connection
from minitri.apps.serve.page import docs, page
from minitri.apps.serve.protocol import Call, Protocol
from minitri.apps.serve.refusals import as_api_error, refuse
from minitri.apps.serve.responses import ResponseWriter
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.worker import NUM_TICKS, Job, Worker

BODY_SECONDS = 30
"""Time for a client to send its request."""
WAITING_SECONDS = 15
"""Time between the signs of life of a stream that waits."""
WRITERS: dict[str, tuple[type[Fields], type[Writer]]] = {
    "/v1/completions": (TextBody, Writer),
    "/v1/chat/completions": (ChatBody, Writer),
    "/v1/responses": (ResponseBody, ResponseWriter),
}
"""Endpoints that generate, with their bodies and the writers of their answers."""
CONVERSIONS: dict[str, tuple[type[ForModel], Callable[..., Json]]] = {
    "/tokenize": (TokenizeBody, Protocol.tokenize),
    "/detokenize": (DetokenizeBody, Protocol.detokenize),
}
"""Endpoints of the tokenizer, with their bodies."""


class Answer(StreamingResponse):
    """Response that begins with its first piece: an error before that has a status of its own."""

    def __init__(self, pieces: AsyncGenerator[bytes, None], kind: str) -> None:
        super().__init__(pieces, headers={"content-type": kind, "cache-control": "no-cache"})
        self._pieces = pieces

    async def stream_response(self, send: Send) -> None:
        held: list[Message] = []

        async def send_with_body(message: Message) -> None:
            held.append(message)
            while held and message["type"] == "http.response.body":
                await send(held.pop(0))

        async with contextlib.aclosing(self._pieces):  # at once, if the client has left
            await super().stream_response(send_with_body)


@dataclass
class Service:
    """Endpoints of one model, and their clients."""

    protocol: Protocol
    worker: Worker
    max_open: int
    """Most texts that run or wait."""
    access: Access = field(default_factory=Access)
    clients: list[str] = field(default_factory=list)
    """Client of each text that runs or waits."""

    @property
    def num_open(self) -> int:
        return len(self.clients)

    @property
    def app(self) -> ASGIApp:
        routes = [
            *(Route(path, self.complete, methods=["POST"]) for path in WRITERS),
            *(Route(path, self.convert, methods=["POST"]) for path in CONVERSIONS),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/", page),
            Route("/docs", lambda _: docs(self.protocol, WRITERS | CONVERSIONS)),
        ]
        router = Router(routes)

        async def check_and_route(scope: Scope, receive: Receive, send: Send) -> None:
            self.access.check_site(HTTPConnection(scope).headers)
            await router(scope, receive, send)

        handled = [ApiError, InputError, HTTPException, ClientDisconnect, Exception]
        handlers = dict.fromkeys(handled, refuse)
        app = Starlette(routes=[Mount("", check_and_route)], exception_handlers=handlers)
        return CORSMiddleware(app, self.access.allow_origin, allow_methods="*", allow_headers="*")

    async def complete(self, request: Request) -> Response:
        """Texts are counted from before a prompt is tokenized to the end of the answer."""
        client, body = await self._asked(request)
        salt = client if self.access.keys and not self.access.share_prefixes else ""
        body_kind, make_writer = WRITERS[request.url.path]
        with self._counted(client, 1):
            call = await run_in_threadpool(self.protocol.read, body, body_kind, client, salt)
        writer = make_writer(call, self.protocol.names[0], self.protocol.engine)
        kind = "text/event-stream" if call.asked.stream else "application/json"
        return Answer(self._pieces(call, writer, client), kind)

    async def _pieces(self, call: Call, writer: Writer, client: str) -> AsyncGenerator[bytes, None]:
        """Answer to a call, piece by piece, while its texts run; cancelled if the client leaves.
        Raises `ApiError` for what goes wrong before the first piece; later that is the last one."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        has_begun = False
        outcome = "left"
        with self._counted(client, len(call.requests)):
            job = Job(call.requests)
            life = loop.create_task(give_signs_of_life(job))
            try:
                self.worker.submit(job)
                async for event in job.events():
                    index = 0 if isinstance(event, Idle) else job.numbers.index(event.row)
                    if isinstance(event, End) and not call.asked.stream:  # can take a second
                        piece = await asyncio.to_thread(writer.take, index, event)
                    else:
                        piece = writer.take(index, event)
                    if piece or call.asked.stream:
                        has_begun = True
                        yield piece
                    if isinstance(event, End):
                        outcome = event.finish_reason
            except Exception as error:
                refused = as_api_error(error)
                outcome = str(refused)
                if not has_begun:
                    raise refused from error
                yield writer.fail(refused)
            finally:
                life.cancel()
                job.is_cancelled = True
                log.info("%s: %s after %.1f s", writer.id, outcome, loop.time() - started)

    async def convert(self, request: Request) -> Response:
        client, body = await self._asked(request)
        kind, convert = CONVERSIONS[request.url.path]
        with self._counted(client, 1):
            asked = await run_in_threadpool(self.protocol.parsed, body, kind)
            return JSONResponse(await run_in_threadpool(convert, self.protocol, asked))

    async def _asked(self, request: Request) -> tuple[str, bytes]:
        """Client and body of a request. Raises `ApiError`."""
        client = self.access.admit(request.headers, request.client)
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("application/json"):  # which a web page cannot send
            message = f"the body's type is {shorten(repr(kind), 60)}; send application/json"
            raise ApiError(415, "unsupported_media_type", message)
        limit = max(1 << 16, 32 * self.protocol.context)  # 8 times what most texts that fit take
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        message = f"the body has more than {limit} bytes; shorten the prompt"
                        raise ApiError(413, "request_too_large", message)
        except TimeoutError:
            message = f"the body was not there in {BODY_SECONDS} s; send it faster"
            raise ApiError(408, "request_timeout", message) from None
        return client, bytes(body)

    @contextlib.contextmanager
    def _counted(self, client: str, num: int) -> Iterator[None]:
        """Counts texts of a client meanwhile. Raises `ApiError` where they are too many."""
        share = self.max_open if self.access.is_for_one else max(1, self.max_open // 2)
        share = self.access.max_requests_per_client or share
        num_running = self.clients.count(client)
        if num > share:
            message = f"n and prompt ask for {num} texts, and {share} may run or wait; ask for less"
            raise ApiError(400, "invalid_request", message, "n")
        if self.num_open + num > self.max_open:
            message = f"{self.num_open} requests run or wait, the most there may be; try later"
            raise ApiError(503, "queue_full", message)
        if num_running + num > share:
            got = f"{num_running} requests of yours run or wait"
            raise ApiError(429, "rate_limit_exceeded", f"{got}, the most of a client; try later")
        self.clients += [client] * num
        try:
            yield
        finally:
            for _ in range(num):
                self.clients.remove(client)

    async def models(self, request: Request) -> Response:
        self.access.admit(request.headers, request.client)
        data = [self._about(name) for name in self.protocol.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        self.access.admit(request.headers, request.client)
        self.protocol.check_model(request.path_params["name"])
        return JSONResponse(self._about(request.path_params["name"]))

    def _about(self, name: str) -> Json:
        about = {"id": name, "object": "model", "created": 0, "owned_by": "minitri"}
        return about | {"max_model_len": self.protocol.context}

    async def health(self, _: Request) -> Response:
        problem = self.worker.problem
        content = {"status": problem or "ok", "requests": self.num_open}
        return JSONResponse(content, 503 if problem else 200)


async def give_signs_of_life(job: Job) -> None:
    """Sends events to a job that may have to wait, so that its client does not give up."""
    while True:
        await asyncio.sleep(WAITING_SECONDS)
        job.put(Idle())


class Server(uvicorn.Server):
    """HTTP server that Ctrl-C and SIGTERM end: then requests have `grace` seconds."""

    def __init__(self, service: Service, grace: float, stall_seconds: float) -> None:
        config = uvicorn.Config(
            service.app, http=Connection, log_config=None, access_log=False, proxy_headers=False
        )
        super().__init__(config)
        self._service = service
        self._grace = grace
        self._ticks = round(10 * stall_seconds / NUM_TICKS)  # of 0.1 s
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)

    def handle_exit(self, *_: Any) -> None:
        if self.should_exit:
            os.write(2, b"stopped\n")
            os._exit(0)  # whatever still runs
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % self._ticks == 0:
            self._service.worker.tick()
        return await super().on_tick(counter)

    async def shutdown(self, *sockets: Any, **by_name: Any) -> None:
        if num := self._service.num_open:
            log.info("finishing %d request%s; again to stop now", num, "s" if num > 1 else "")
        why = "the server is stopping; ask again later"
        asyncio.get_running_loop().call_later(self._grace, self._service.worker.give_up, why)
        timer = threading.Timer(self._grace + 2, self.handle_exit)  # 2 s for errors to be sent
        timer.daemon = True
        timer.start()
        await super().shutdown(*sockets, **by_name)
