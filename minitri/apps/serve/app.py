"""The HTTP side: endpoints and errors, as an ASGI application, and its server. If a request fails,
the client gets OpenAI's error JSON; the others do not notice. A client that leaves frees its row.
"""

import asyncio
import contextlib
import functools
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from minitri import End, Idle, InputError
from minitri.apps.serve.access import Access, ApiError
from minitri.apps.serve.answers import Json, Writer, to_json
from minitri.apps.serve.connections import Connection
from minitri.apps.serve.page import docs, page
from minitri.apps.serve.protocol import Call, ChatFields, Fields, Protocol, TextFields
from minitri.apps.serve.responses import ResponseFields, ResponseWriter
from minitri.apps.serve.tokens import DetokenizeFields, TokenizeFields, detokenize, tokenize
from minitri.core.errors import FaultError, shorten
from minitri.core.log import log
from minitri.worker import NUM_TICKS, Job, Worker

BODY_SECONDS = 30
"""For a client to send its request."""
WAITING_SECONDS = 15
"""Between signs of life in a stream that waits."""
NAMED = re.compile(r"(?:the )?'?(\w+)[\w.\[\]]*'?(?: or \w+)? (?:is|has|cannot) ")
"""The field that is wrong, in the message of an error."""
KINDS: dict[str, tuple[type[Fields], Callable[..., Writer]]] = {
    "/v1/completions": (TextFields, Writer),
    "/v1/chat/completions": (ChatFields, Writer),
    "/v1/responses": (ResponseFields, ResponseWriter),
}
"""Endpoints of texts: what may be asked for, and who words the answer."""
CONVERSIONS = {
    "/tokenize": (TokenizeFields, tokenize),
    "/detokenize": (DetokenizeFields, detokenize),
}
"""Endpoints of the tokenizer."""


@dataclass
class Service:
    """The endpoints, and what they share."""

    protocol: Protocol
    worker: Worker
    max_open: int
    """Requests that may run or wait."""
    access: Access = field(default_factory=Access)
    clients: list[str] = field(default_factory=list)
    """One for each request that runs or waits."""

    @property
    def num_open(self) -> int:
        return len(self.clients)

    @property
    def app(self) -> ASGIApp:
        fields = {path: kind for path, (kind, _) in [*KINDS.items(), *CONVERSIONS.items()]}
        routes = [
            *(Route(path, self.complete, methods=["POST"]) for path in KINDS),
            *(Route(path, self.convert, methods=["POST"]) for path in CONVERSIONS),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/", page),
            Route("/docs", lambda _: docs(self.protocol, fields)),
        ]
        router = Router(routes)

        async def check_and_route(scope: Scope, *ends: Any) -> None:
            self.access.check_site(HTTPConnection(scope).headers)
            await router(scope, *ends)

        handled = [ApiError, InputError, HTTPException, ClientDisconnect, Exception]
        handlers = dict.fromkeys(handled, refuse)
        app = Starlette(routes=[Mount("", check_and_route)], exception_handlers=handlers)
        return CORSMiddleware(app, self.access.allow_origin, allow_methods="*", allow_headers="*")

    async def complete(self, request: Request) -> ASGIApp:
        client, body = await self._asked(request)
        salt = client if self.access.keys and not self.access.share_prefixes else ""
        kind, _ = KINDS[request.url.path]
        read = functools.partial(self.protocol.read, body, kind, client, salt)
        return functools.partial(self._take_in, client, read)

    async def convert(self, request: Request) -> Response:
        client, body = await self._asked(request)
        _, conversion = CONVERSIONS[request.url.path]
        with self._counted(client, 1):
            return answer(await run_in_threadpool(conversion, self.protocol, body))

    async def _asked(self, request: Request) -> tuple[str, bytes]:
        """Who asks, and the body. Raises `ApiError`."""
        client = self.access.admit(request.headers, request.client)
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("application/json"):  # which a web page cannot send
            message = f"the body's type is {shorten(repr(kind), 60)}; send application/json"
            raise ApiError(415, "unsupported_media_type", message)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(request)
        except TimeoutError:
            message = f"the body was not there in {BODY_SECONDS} s; send it faster"
            raise ApiError(408, "request_timeout", message) from None
        return client, body

    @contextlib.contextmanager
    def _counted(self, client: str, num: int) -> Iterator[None]:
        """Counts texts of a client meanwhile. Raises `ApiError` where they are too many."""
        share = self.max_open if self.access.is_for_one else max(1, self.max_open // 2)
        share = self.access.max_requests_per_client or share
        num_own = self.clients.count(client)
        if num > share:
            message = f"n and prompt ask for {num} texts, and {share} may run or wait; ask for less"
            raise ApiError(400, "invalid_request", message, "n")
        if self.num_open + num > self.max_open:
            message = f"{self.num_open} requests run or wait, the most there may be; try later"
            raise ApiError(503, "queue_full", message)
        if num_own + num > share:
            message = f"{num_own} requests of yours run or wait, the most of a client; try later"
            raise ApiError(429, "rate_limit_exceeded", message)
        self.clients += [client] * num
        try:
            yield
        finally:
            for _ in range(num):
                self.clients.remove(client)

    async def _take_in(self, client: str, read: Callable[[], Call], *ends: Any) -> None:
        """Counts texts from before a prompt is tokenized to the end of the answer."""
        with self._counted(client, 1):
            call = await run_in_threadpool(read)
        with self._counted(client, len(call[0])):
            await self._answer(call, *ends)

    async def _body(self, request: Request) -> bytes:
        limit = max(1 << 16, 32 * self.protocol.context)  # 8 times what most texts that fit take
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                message = f"the body has more than {limit} bytes, the limit; shorten the prompt"
                raise ApiError(413, "request_too_large", message)
        return bytes(body)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call while its row runs, until it ends or the client leaves."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        requests, asked, chat = call
        job = Job(requests)

        async def watch() -> None:
            leaving = asyncio.ensure_future(receive())
            while not (await asyncio.wait([leaving], timeout=WAITING_SECONDS))[0]:
                job.put(Idle())
            job.put(None)

        _, write = KINDS[scope["path"]]
        writer = write(requests, asked, self.protocol.names[0], self.protocol.engine, chat)
        kind = b"text/event-stream" if asked.stream else b"application/json"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        last = {"type": "http.response.body"}
        has_begun = False
        outcome = "left"
        watcher = loop.create_task(watch())
        try:
            self.worker.submit(job)
            async for event in job.events():
                index = 0 if isinstance(event, Idle) else job.numbers.index(event.row)
                if isinstance(event, End) and not asked.stream:  # which can take a second
                    body = await asyncio.to_thread(writer.take, index, event)
                else:
                    body = writer.take(index, event)
                if not has_begun and (body or asked.stream):
                    has_begun = True
                    await send(start)
                if body:
                    await send(last | {"body": body, "more_body": True})
                if isinstance(event, End):
                    outcome = event.finish_reason
            if has_begun:  # else the client has left
                await send(last)
        except Exception as error:
            refused = as_api_error(error)
            outcome = str(refused)
            if has_begun:
                await send(last | {"body": writer.fail(refused)})
            else:
                await (await refuse(None, refused))(scope, receive, send)
        finally:
            watcher.cancel()
            job.is_cancelled = True
            log.info("%s: %s after %.1f s", writer.id, outcome, loop.time() - started)

    async def models(self, request: Request) -> Response:
        self.access.admit(request.headers, request.client)
        return answer({"object": "list", "data": [*map(self._about, self.protocol.names)]})

    async def model(self, request: Request) -> Response:
        self.access.admit(request.headers, request.client)
        self.protocol.check_model(request.path_params["name"])
        return answer(self._about(request.path_params["name"]))

    def _about(self, name: str) -> Json:
        about = {"id": name, "object": "model", "created": 0, "owned_by": "minitri"}
        return about | {"max_model_len": self.protocol.context}

    async def health(self, _: Request) -> Response:
        problem = self.worker.problem
        content = {"status": problem or "ok", "requests": self.num_open}
        return answer(content, 503 if problem else 200)


class Server(uvicorn.Server):
    """From now on Ctrl-C and SIGTERM end it: then requests have `grace` seconds."""

    def __init__(self, service: Service, grace: float, stall_seconds: float) -> None:
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "proxy_headers": False}
        super().__init__(uvicorn.Config(service.app, http=Connection, **quiet))
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


def answer(content: Json, status: int = 200, **headers: str) -> Response:
    """A response of JSON."""
    return Response(to_json(content), status, headers, media_type="application/json")


async def refuse(_: Request | None, error: Exception) -> Response:
    """OpenAI's JSON for what went wrong."""
    refused = as_api_error(error)
    return answer(refused.content, refused.status, **refused.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; the traceback of a bug is in the log."""
    match error:
        case ApiError():
            return error
        case InputError():
            ways = (way for way in error.ways if "=" not in way)  # not by settings of the library
            message = str(InputError(error.message, *ways))
            if isinstance(error, FaultError):
                return ApiError(503, "unavailable", message)
            field = NAMED.match(message)
            return ApiError(400, "invalid_request", message, field and field[1])
        case HTTPException():
            refused = ApiError(error.status_code, "invalid_request", error.detail)
            refused.headers |= error.headers or {}  # which methods are allowed
            return refused
    message = f"a bug: {shorten(repr(error))}; see the server's log"
    return ApiError(500, "internal_error", message)
