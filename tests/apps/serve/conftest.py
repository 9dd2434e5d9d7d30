"""A server of the tiny model on a port of its own, with real sockets."""

import contextlib
import functools
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn

import minitri
from minitri.apps.serve.access import Access
from minitri.apps.serve.app import Service
from minitri.apps.serve.connections import Connection
from minitri.apps.serve.protocol import Protocol
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.text.chat_template import ChatTemplate
from minitri.worker import Worker
from tests.apps.serve.templates import FAMILIES
from tests.conftest import write_hf_folder
from tests.files.test_chat_template import CHATML

CONTEXT, NUM_ROWS = 400, 4
COUPLED = SpeculationConfig("triforce", gamma1=2, gamma2=4, coupled=True)


class Server:
    """Its service, address and clients."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0)
        self.clients = contextlib.ExitStack()

    def client(self, address: str) -> openai.OpenAI:
        """One of another address of this machine, with connections of its own."""
        http = httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60)
        return self.clients.enter_context(self.openai.copy(http_client=http))

    def post(self, path="/v1/completions", **fields) -> httpx.Response:
        return self.http.post(path, json=fields)

    def raw(self, body: bytes = b"", missing: int = 0, **fields) -> socket.socket:
        """A connection that has sent a POST, without its last bytes, and waits for nothing."""
        body = body or json.dumps(fields).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        head += f"Content-Length: {len(body) + missing}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(head.encode() + body)
        return connection

    def wait(self, is_so) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_until_free(self) -> None:
        self.wait(lambda: not (self.service.num_open or self.service.worker._jobs))


def opened(engine, before, num_rows: int, speculation: SpeculationConfig, context: int):
    """An open run with something to do before each of its events."""
    run = engine.open(
        batch_size=num_rows,
        generation=GenerationConfig(reserve=context),
        speculation=speculation,
    )
    events = run._events

    def watched():
        with contextlib.closing(events):
            while True:
                before()
                yield next(events)

    run._events = watched()
    return run


@contextlib.contextmanager
def serving(
    engine,
    *,
    before=lambda: None,
    num_rows=NUM_ROWS,
    max_queue=64,
    speculation=COUPLED,
    ignored=None,
    run=None,
    context=CONTEXT,
    **access,
):
    """A server in a thread, whose worker calls `before` before each event, or which has this run in
    the place of the engine's."""
    protocol = Protocol(engine, ["tiny"], SamplingParams(temperature=1.0), context, ignored)
    listener = socket.create_server(("127.0.0.1", 0))
    start = functools.partial(opened, engine, before, num_rows, speculation, context)
    worker = Worker(lambda _: run or start(), run or start())
    with listener, contextlib.closing(worker):
        service = Service(protocol, worker, num_rows + max_queue, Access(**access))
        server = uvicorn.Server(uvicorn.Config(service.app, log_config=None, http=Connection))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        own = Server(service, listener.getsockname()[1])
        try:
            with own.http, own.openai, own.clients:
                yield own
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    """A tiny model with room for long conversations."""
    folder = tmp_path_factory.mktemp("models") / "roomy"
    write_hf_folder(folder, max_position_embeddings=1 << 15)
    return minitri.load(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def server(engine):
    with serving(engine) as running:
        yield running


@pytest.fixture
def template(engine, monkeypatch) -> ChatTemplate:
    made = ChatTemplate(CHATML, {})
    monkeypatch.setitem(vars(engine.tokenizer), "chat_template", made)
    return made


@pytest.fixture(params=FAMILIES)
def family(roomy, monkeypatch, request):
    """The name of one of the formats of calls, whose chat template the model has."""
    template = ChatTemplate(FAMILIES[request.param], {})
    monkeypatch.setitem(vars(roomy.tokenizer), "chat_template", template)
    return request.param
