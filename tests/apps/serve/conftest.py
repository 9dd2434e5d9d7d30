"""Servers of tiny models, each on a free port with real sockets, and what their clients do."""

import contextlib
import json
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

import httpx
import openai
import pytest
import uvicorn

import minitri
from minitri.apps.serve.access import Access
from minitri.apps.serve.app import Connection, Service
from minitri.apps.serve.protocol import Protocol
from minitri.core.requests import Event, Idle, Request
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.stats import Stats
from minitri.text.prepare import prepare
from minitri.worker import Worker
from tests.apps.serve.templates import QWEN
from tests.conftest import write_hf_folder
from tests.files.test_chat_template import CHATML

CONTEXT, NUM_ROWS, MAX_OPEN = 400, 4, 68
PATIENCE = 60  # seconds; only a test that fails waits for so long
COUPLED = SpeculationConfig("triforce", gamma1=2, gamma2=4, coupled=True)
PROMPT = "She had been forced into prudence"
ENDLESS = {"prompt": PROMPT, "max_tokens": 380, "ignore_eos": True, "stream": True}


class Gate(threading.Event):
    """A hook that holds up the model after some free steps, until it is set."""

    is_reached = False

    def __init__(self, num_free: int) -> None:
        super().__init__()
        self.num_free = num_free

    def __call__(self) -> None:
        self.num_free -= 1
        if self.num_free < 0:
            self.is_reached = True
            self.wait(PATIENCE)


@dataclass
class Server:
    """A running server: its service, address and clients."""

    service: Service
    runs: list
    hooks: dict
    port: int

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)
        how = {"base_url": self.url + "/v1", "http_client": self.http, "max_retries": 0}
        self.openai = openai.OpenAI(api_key="x", **how)

    def post(self, path="/v1/completions", key="x", source="127.0.0.1", **fields):
        """The response to any body of Python's JSON, sent with a key from this machine."""
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        sent = {"content": json.dumps(fields), "headers": headers, "timeout": PATIENCE}
        if source == "127.0.0.1":
            return self.http.post(path, **sent)
        with httpx.Client(transport=httpx.HTTPTransport(False, local_address=source)) as http:
            return http.post(self.url + path, **sent)

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        connection.sendall(sent)
        return connection

    def raw(self, **fields) -> socket.socket:
        """A connection that has sent a POST and waits for nothing."""
        return self.connect(post_of(json.dumps(fields).encode()))

    def wait(self, is_so) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def wait_for(self, num_open: int) -> None:
        """Until this many texts run or wait."""
        self.wait(lambda: self.service.clients.total() == num_open)

    @contextlib.contextmanager
    def hooked(self, **hooks):
        """Calls `step` before each event of the model, and `start` before a run is opened."""
        self.hooks |= hooks
        try:
            yield hooks["step"]
        finally:
            if isinstance(hooks["step"], Gate):
                hooks["step"].set()
            self.hooks.clear()

    def held(self, num_free=0):
        """The model does nothing, after some free steps, until the gate is set."""
        return self.hooked(step=Gate(num_free))

    @contextlib.contextmanager
    def limited(self, max_open=MAX_OPEN, **access):
        """Other limits and another access control for a while."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.service, "max_open", max_open)
            patch.setattr(self.service, "access", Access(**access))
            yield


def post_of(body: bytes, *headers: str, missing: int = 0) -> bytes:
    """A POST as bytes, whose length counts bytes that are missing."""
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [*headers, f"Content-Length: {len(body) + missing}"]
    return "\r\n".join([*head, "", ""]).encode() + body


class HookedRun:
    """An open run with something to do before each of its events."""

    def __init__(self, run, hooks: dict) -> None:
        self.run = run
        self._hooks = hooks
        self.submit, self.cancel, self.close = run.submit, run.cancel, run.close

    def __next__(self):
        self._hooks.get("step", lambda: None)()
        return next(self.run)


class ScriptedRun:
    """Says what a test wants, in the place of a model: answers each request with the next text."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.tokenizer = engine.tokenizer
        self.texts: deque[str] = deque()
        """Texts to say; without any the answer is empty."""
        self.requests: list[Request] = []
        self._events: deque[Event] = deque()

    @property
    def prompt(self) -> list[int]:
        return list(self.requests[-1].prompt)

    def written(self, ids: list[int]) -> str:
        return self.tokenizer.text_bytes(ids, {0, 1, 2}).decode("utf-8", "replace")

    def submit(self, request: Request) -> int:
        state = prepare(len(self.requests), request, self._engine.model, self.tokenizer)
        self.requests.append(request)
        ids = self.tokenizer.encode_marked(self.texts.popleft() if self.texts else "")
        for token in [*ids, 2]:
            self._events.append(state.push(token, "bonus", (2,)))
            if state.finish_reason is not None:
                break
        self._events.append(state.end(Stats()))
        return state.number

    def cancel(self, number: int) -> None:
        self._events = deque(event for event in self._events if event.row != number)

    def close(self) -> None:
        pass

    def __next__(self) -> Event:
        return self._events.popleft() if self._events else Idle()


@contextlib.contextmanager
def serving(
    engine, *, speculation=COUPLED, lenient=False, run=None, context=CONTEXT, name="tiny", **access
):
    """A server in a thread, which has this run in the place of the engine's, if one is given."""
    runs, hooks = [], {}

    def open_run(_=None):
        hooks.get("start", lambda: None)()
        how = {"generation": GenerationConfig(reserve=context), "speculation": speculation}
        runs.append(HookedRun(run or engine.open(batch_size=NUM_ROWS, **how), hooks))
        return runs[-1]

    protocol = Protocol(engine, [name, f"org/{name}"], SamplingParams(1.0), context, lenient)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else answers take 40 ms
    worker = Worker(open_run, open_run())
    with listener, contextlib.closing(worker):
        service = Service(protocol, worker, MAX_OPEN, Access(**access))
        how = {"log_config": None, "http": Connection, "timeout_keep_alive": 600}  # clients close
        server = uvicorn.Server(uvicorn.Config(service.app, **how))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running = Server(service, runs, hooks, listener.getsockname()[1])
        try:
            with running.http:
                yield running
        finally:
            server.should_exit = True
            thread.join()


def own_text(engine, prompt=PROMPT, *, seed=7, num=24, temperature=1.0, **fields) -> str:
    """The text of the engine itself, without a server or speculation."""
    how = {"speculation": SpeculationConfig("autoregressive", coupled=True), "seed": seed}
    how |= {"sampling": SamplingParams(temperature, **fields), "generation": GenerationConfig(num)}
    return engine.complete(prompt, **how).text


def complete(server, **fields):
    """An answer of /v1/completions by OpenAI's client; by default its text is `own_text`."""
    defaults = {"model": "tiny", "prompt": PROMPT, "seed": 7, "max_tokens": 24}
    return server.openai.completions.create(**defaults | fields)


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "roomy"
    write_hf_folder(folder, max_position_embeddings=1 << 15)
    return minitri.load(folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def shared_server(engine):
    with serving(engine) as running:
        yield running


@pytest.fixture
def server(shared_server):
    """A server without any request: what other tests began has ended."""
    shared_server.wait_for(num_open=0)
    return shared_server


@pytest.fixture(scope="session")
def roomy_server(roomy):
    with serving(roomy, run=ScriptedRun(roomy), context=4096) as running:
        yield running


@pytest.fixture
def use_template(roomy, monkeypatch):

    def use(source: str) -> None:
        monkeypatch.setattr(roomy.tokenizer, "chat_template", source)

    return use


@pytest.fixture
def run(roomy_server, use_template) -> ScriptedRun:
    """What `scripted` serves: it says what a test gives it. The template is Hermes'."""
    use_template(QWEN)
    run = roomy_server.runs[0].run
    run.texts.clear()
    return run


@pytest.fixture
def scripted(roomy_server, run):
    return roomy_server


@pytest.fixture
def render(engine, monkeypatch):
    """Gives the model a chat template; the function that renders by it."""
    monkeypatch.setattr(engine.tokenizer, "chat_template", CHATML)
    return engine.tokenizer.render_chat
