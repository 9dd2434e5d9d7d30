"""A server of the tiny model on a port of its own, with real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import httpx
import openai
import pytest
import uvicorn

from minitri.serve.app import Service
from minitri.serve.protocol import Protocol
from minitri.serve.worker import Worker
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

CONTEXT, NUM_ROWS = 400, 4


class Server:
    """Its service, address and clients."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0)

    def post(self, path="/v1/completions", **fields) -> httpx.Response:
        return self.http.post(path, json=fields)

    def error(self, path="/v1/completions", status=400, **fields) -> str:
        """The message of a request that must be refused."""
        response = self.post(path, **fields)
        assert response.status_code == status, response.text
        return response.json()["error"]["message"]

    def wait_until_free(self) -> None:
        deadline = time.monotonic() + 20
        while self.service.num_open or self.service.worker.num_running:
            assert time.monotonic() < deadline, "a row was lost"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(engine, *, open_run=None, num_rows=NUM_ROWS, max_queue=100, seconds=60.0, **options):
    """A server in a thread; `open_run` takes the place of the engine's run."""
    run = {
        "batch_size": num_rows,
        "generation": GenerationConfig(reserve=CONTEXT),
        "speculation": SpeculationConfig("triforce", gamma1=2, gamma2=4, coupled=True),
    }
    protocol = Protocol(engine, {"tiny"}, SamplingParams(temperature=1.0), CONTEXT)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, Worker(open_run or (lambda: engine.open(**run))) as worker:
        service = Service(
            engine, worker, protocol, num_rows=num_rows, max_queue=max_queue, seconds=seconds,
            **options,
        )  # fmt: skip
        server = uvicorn.Server(uvicorn.Config(service.app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        own = Server(service, listener.getsockname()[1])
        try:
            with own.http, own.openai:
                yield own
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def server(engine):
    with serving(engine) as running:
        yield running
