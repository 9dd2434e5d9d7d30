"""The HTTP side: endpoints, limits and errors, as a small ASGI application.

    app = Service(engine, worker, protocol, num_rows=8, max_queue=64, seconds=600).app

Every request takes one way: key, body, JSON, a place in the queue, events, answer; wherever it
fails, the client gets OpenAI's error JSON, and the others do not notice. An answer watches its
connection: a client that leaves frees its row.
"""

import asyncio
import contextlib
import functools
import hmac
import logging
import time
from collections import defaultdict
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from minitri.engine import Engine
from minitri.errors import InputError, shorten
from minitri.requests import End, Event, Token
from minitri.serve.answers import WRITERS, num_guessed, to_json
from minitri.serve.protocol import ApiError, Call, Protocol
from minitri.serve.worker import Worker

log = logging.getLogger("minitri")
FAREWELL_SECONDS = 2.0
"""For a client to take in an error, whatever it is doing."""


class Service:
    """The endpoints, and what they share."""

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        protocol: Protocol,
        *,
        num_rows: int,
        max_queue: int,
        seconds: float,
        body_seconds: float = 30.0,
        api_key: str | None = None,
    ) -> None:
        """`seconds` are for a request, waiting included; `body_seconds` to send it."""
        self.engine = engine
        self.worker = worker
        self.protocol = protocol
        self.num_rows = num_rows
        self.max_open = num_rows + max_queue
        self.seconds = seconds
        self.body_seconds = body_seconds
        self.api_key = api_key
        self.num_open = 0
        self.totals: defaultdict[str, float] = defaultdict(float)
        complete = functools.partial(functools.partial, self.complete)
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", complete(is_chat=False), methods=["POST"]),
            Route("/v1/chat/completions", complete(is_chat=True), methods=["POST"]),
            Route("/metrics", self.metrics),
            Route("/health", self.health),
        ]
        handled: list[type[Exception]] = [ApiError, InputError, HTTPException, Exception]
        self.app = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, self.refuse))

    async def complete(self, request: Request, *, is_chat: bool) -> Response:
        """Both kinds of completions."""
        self._check_key(request)
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":  # nor from any web page
            got = f"the body's type is {shorten(repr(kind), 60)}"
            message = f"{got}; send application/json"
            raise ApiError(415, "unsupported_media_type", message, connection="close")
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await self._body(request)
        except (TimeoutError, ClientDisconnect):
            message = f"the body was not there in {self.body_seconds:g} s; send it faster"
            raise ApiError(408, "request_timeout", message, connection="close") from None
        call = await run_in_threadpool(self.protocol.read, body, is_chat=is_chat)
        if self.num_open >= self.max_open:
            message = f"{self.num_open} requests run or wait, the most there may be; try later"
            raise ApiError(503, "queue_full", message, **{"retry-after": "1"})
        return Answer(self, call)

    async def _body(self, request: Request) -> bytes:
        """No more than the limit is read of a body that is longer."""
        limit = self.protocol.max_body_bytes
        body = bytearray()
        length = int(request.headers.get("content-length", 0))
        if length <= limit:
            async for part in request.stream():
                body += part
                length = max(length, len(body))
                if length > limit:
                    break
            else:
                return bytes(body)
        message = f"the body has {length} bytes or more, the limit is {limit}; shorten the prompt"
        raise ApiError(413, "request_too_large", message, connection="close")

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        if self.api_key and not hmac.compare_digest(given, self.api_key.encode()):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", message, connection="close")

    async def models(self, request: Request) -> Response:
        """The one model, under its names."""
        self._check_key(request)
        about = {"object": "model", "created": 0, "owned_by": "minitri"}
        about["max_model_len"] = self.protocol.context
        names = sorted(self.protocol.names)
        return answer(200, {"object": "list", "data": [{"id": name, **about} for name in names]})

    async def health(self, _: Request) -> Response:
        """Whether requests are answered."""
        is_alive = self.worker.is_alive
        return answer(200 if is_alive else 503, {"status": "ok" if is_alive else "stopped"})

    async def metrics(self, request: Request) -> Response:
        """In Prometheus' text format."""
        self._check_key(request)
        num_running = min(self.num_open, self.num_rows)
        gauges = {"running": num_running, "waiting": self.num_open - num_running}
        rows = [(f"requests_{name}", "gauge", float(value)) for name, value in gauges.items()]
        rows += [(f"{name}_total", "counter", value) for name, value in self.totals.items()]
        lines = [
            f"# TYPE minitri_{n} {kind}\nminitri_{n} {value:.12g}\n" for n, kind, value in rows
        ]
        return PlainTextResponse("".join(lines))

    def count(self, **amounts: float) -> None:
        """Adds to the totals."""
        for name, amount in amounts.items():
            self.totals[name] += amount

    async def refuse(self, _: Request, error: Exception) -> Response:
        """OpenAI's JSON for what went wrong."""
        self.count(requests_refused=1)
        return failure(error)


class Answer(Response):
    """The answer to one call, written while its row runs."""

    def __init__(self, service: Service, call: Call) -> None:
        self._service, self._call = service, call
        self._writer = WRITERS[call.is_chat](call, min(service.protocol.names), service.engine)
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._tokens: list[Token] = []
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Takes events to their end, to the time limit, or until the client leaves."""
        service = self._service
        loop = asyncio.get_running_loop()
        started = time.monotonic()

        def deliver(event: Event | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        outcome = "left"
        service.num_open += 1
        job = service.worker.submit(self._call.request, deliver)
        watcher = loop.create_task(self._watch(receive))
        try:
            async with asyncio.timeout(service.seconds):
                outcome = await self._follow(send)
        except TimeoutError:
            outcome = "timeout"
            limit = f"{service.seconds:g} s, the limit"
            error = ApiError(504, "timeout", f"no end in {limit}; lower max_tokens, or try later")
            await self._fail(error, scope, receive, send)
        except (ApiError, InputError) as error:
            outcome = "error"
            await self._fail(error, scope, receive, send)
        finally:
            watcher.cancel()
            service.worker.cancel(job)
            service.num_open -= 1
            seconds = time.monotonic() - started
            service.count(**{f"requests_{outcome}": 1, "request_seconds": seconds})
            log.info("%s: %s after %.1f s", self._writer.id, outcome, seconds)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    async def _follow(self, send: Send) -> str:
        """Sends what the run says; returns how it ended."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, Exception):
                raise event if isinstance(event, InputError) else bug(event)
            if isinstance(event, Token):
                self._tokens.append(event)
            if self._call.stream or isinstance(event, End):
                await self._send(send, self._worded(event), more=not isinstance(event, End))
            if isinstance(event, End):
                stats = event.row_stats
                self._service.count(
                    prompt_tokens=stats.num_prompt_tokens,
                    cached_tokens=stats.num_cached_tokens,
                    generated_tokens=stats.num_generated_tokens,
                    guessed_tokens=num_guessed(stats),
                )
                return event.finish_reason
        return "left"

    def _worded(self, event: Event) -> bytes:
        """What an event adds to the answer."""
        writer = self._writer
        if isinstance(event, End) and not self._call.stream:
            return to_json(writer.whole(self._tokens, event))
        chunks = [] if self._has_begun else writer.first()
        if isinstance(event, Token):
            chunks += writer.chunk(event)
        elif isinstance(event, End):
            chunks += writer.last(event)
        done = b"data: [DONE]\n\n" if isinstance(event, End) else b""
        return b"".join(b"data: %b\n\n" % to_json(chunk) for chunk in chunks) + done

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        if not self._has_begun:
            self._has_begun = True
            kind = b"text/event-stream" if self._call.stream else b"application/json"
            headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends with an error: as the whole answer, or as the last event of a stream."""
        response = failure(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                if not self._has_begun:
                    await response(scope, receive, send)
                elif self._call.stream:
                    await self._send(send, b"data: %b\n\n" % bytes(response.body), more=False)


class Refusal(Response):
    """An answer that may come before the client has sent all of its request.

    For a moment the rest is read and dropped: who is still sending would otherwise see a connection
    that was reset, and not the answer.
    """

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b""})


def answer(status: int, content: dict[str, Any]) -> Response:
    """A response of JSON."""
    return Response(to_json(content), status, media_type="application/json")


def bug(error: Exception) -> ApiError:
    """What a client is told of one; the traceback is in the log."""
    return ApiError(500, "internal_error", f"a bug: {shorten(repr(error))}; see the server's log")


def failure(error: Exception) -> Response:
    """OpenAI's JSON for what went wrong."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, "invalid_request", f"{error.detail}; see the README")
    elif isinstance(error, InputError):
        error = ApiError(400, "invalid_request", str(error))
    elif not isinstance(error, ApiError):
        error = bug(error)
    kind = Refusal if "connection" in error.headers else Response
    return kind(to_json(error.content), error.status, error.headers, "application/json")
