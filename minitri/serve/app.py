"""The HTTP side: endpoints, limits and errors, as a small ASGI application.

    app = Service(protocol, worker, max_open=72, seconds=600).app

Every request takes one way: key, body, JSON, a place in the queue, events, answer; wherever it
fails, the client gets OpenAI's error JSON, and the others do not notice. An answer watches its
connection: a client that leaves frees its row.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minitri import End, Event, InputError
from minitri.errors import shorten
from minitri.serve.answers import Json, Writer, in_stream, to_json
from minitri.serve.protocol import ApiError, Call, Protocol
from minitri.serve.worker import Worker

log = logging.getLogger("minitri")
BODY_SECONDS = 30.0
"""For a client to send its request."""


@dataclass
class Service:
    """The endpoints, and what they share."""

    protocol: Protocol
    worker: Worker
    max_open: int
    """Requests that may run or wait,"""
    seconds: float
    """and for how long each."""
    api_key: str | None = None
    num_open: int = 0

    @property
    def app(self) -> Starlette:
        """What a web server runs."""
        text = functools.partial(self.complete, is_chat=False)
        chat = functools.partial(self.complete, is_chat=True)
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", self.health),
        ]
        handled: list[type[Exception]] = [ApiError, InputError, HTTPException, Exception]
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, refuse))

    async def complete(self, request: Request, *, is_chat: bool) -> Response:
        """Both kinds of completions."""
        self._check_key(request)
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("application/json"):  # which a web page cannot send
            message = f"the body's type is {shorten(repr(kind), 60)}; send application/json"
            raise ApiError(415, "unsupported_media_type", message)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._body(request)
        except (TimeoutError, ClientDisconnect):
            message = f"the body was not there in {BODY_SECONDS:g} s; send it faster"
            raise ApiError(408, "request_timeout", message, connection="close") from None
        call = await run_in_threadpool(self.protocol.read, body, is_chat=is_chat)
        if self.num_open >= self.max_open:
            message = f"{self.num_open} requests run or wait, the most there may be; try later"
            raise ApiError(503, "queue_full", message, **{"retry-after": "1"})
        return Answer(self, call)

    async def _body(self, request: Request) -> bytes:
        """No more than the limit is kept of a body that is longer."""
        limit = self.protocol.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                message = f"the body has more than {limit} bytes, the limit; shorten the prompt"
                raise ApiError(413, "request_too_large", message)
        return bytes(body)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self.api_key and not hmac.compare_digest(given, self.api_key.encode()):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", message)

    async def models(self, request: Request) -> Response:
        """The one model, under its names."""
        self._check_key(request)
        about = {"object": "model", "created": 0, "owned_by": "minitri"}
        about |= {"max_model_len": self.protocol.context}
        data = [about | {"id": name} for name in self.protocol.names]
        return answer({"object": "list", "data": data})

    async def health(self, _: Request) -> Response:
        """Whether requests are answered, and how many run or wait."""
        return answer({"status": "ok", "requests": self.num_open})


class Answer(Response):
    """The answer to one call, written while its row runs."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service = service
        self._call = call
        self._writer = Writer(call, service.protocol.names[0], service.protocol.engine)
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes events to their end, to the time limit, or until the client leaves."""
        service = self._service
        loop = asyncio.get_running_loop()
        started = loop.time()

        def deliver(event: Event | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        service.num_open += 1
        job = service.worker.submit(self._call.request, deliver)
        watcher = loop.create_task(self._watch(receive))
        outcome: str | ApiError = "left"
        try:
            async with asyncio.timeout(service.seconds):
                outcome = await self._follow(send)
        except TimeoutError:
            message = f"no end in {service.seconds:g} s, the limit; lower max_tokens, or try later"
            outcome = ApiError(504, "timeout", message)
        except ApiError as error:
            outcome = error
        finally:
            watcher.cancel()
            service.worker.cancel(job)
            service.num_open -= 1
            log.info("%s: %s after %.1f s", self._writer.id, outcome, loop.time() - started)
        if isinstance(outcome, ApiError) and not self._has_begun:
            await answer(outcome.content, outcome.status)(scope, receive, send)
        elif isinstance(outcome, ApiError) and self._call.stream:
            await self._send(send, in_stream(outcome.content), more=False)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    async def _follow(self, send: Send) -> str:
        """Sends what the run says; returns how it ended."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise as_api_error(event)
            body = self._writer.take(event)
            if body or self._call.stream:
                await self._send(send, body, more=not isinstance(event, End))
            if isinstance(event, End):
                return event.finish_reason
        return "left"

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._has_begun:
            self._has_begun = True
            kind = b"text/event-stream" if self._call.stream else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


def answer(content: Json, status: int = 200, **headers: str) -> Response:
    """A response of JSON."""
    return Response(to_json(content), status, headers, "application/json")


async def refuse(_: Request, error: Exception) -> Response:
    """OpenAI's JSON for what went wrong."""
    refused = as_api_error(error)
    return answer(refused.content, refused.status, **refused.headers)


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error; the traceback of a bug is in the log."""
    match error:
        case ApiError():
            return error
        case InputError():
            return ApiError(400, "invalid_request", str(error))
        case HTTPException():
            return ApiError(error.status_code, "invalid_request", error.detail)
    message = f"a bug: {shorten(repr(error))}; see the server's log"
    return ApiError(500, "internal_error", message)
