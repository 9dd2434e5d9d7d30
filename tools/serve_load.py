"""Load test of a server: is an answer lost, does load change a text, does memory grow?

    python -m tools.serve_load --requests 20000    # with a tiny random model, made here
    python -m tools.serve_load --requests 300 --model smollm2-135m --server-flags=--coupled

Starts `python -m minitri serve` and sends prompts of 10 to 1,000 tokens, log-uniformly mixed, and
of `--long-share` of the requests 1,000 to `--longest`; the first have `--longest`. One client in
ten leaves its answers in the middle, one in ten reads slowly; each has its own address. One request
in ten has a grammar, one in a hundred an impossible one. Every request must end with a whole
answer, a refusal or its client's leaving; else it is lost. Some texts are asked for again, alone.
Times are those of clients that neither leave nor are slow; short prompts have less than 100 tokens.
Exits with 1 if the server lost an answer, changed a text, kept a row or did not end well.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import demo_text
from minitri.core.errors import InputError
from minitri.core.log import log
from minitri.core.model.llama import Llama
from minitri.files.checkpoint import placements
from minitri.files.hf_config import read_config
from tools.flags import positive

LONG = 1000  # tokens from which on a prompt is long
NUM_LONGEST = 16  # first requests with the longest prompt: rows keep the memory they once took
PATIENCE = 1800  # seconds of silence after which a request is lost
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "eos_token_id": [2],
}
"""Fields of the config.json of the tiny model."""


@dataclass
class Outcome:
    """Outcome of one request."""

    number: int
    num_tokens: int
    kind: str
    end: str = "lost"  # or answered, refused, left
    text: str = ""
    waits: list[float] = field(default_factory=list)  # seconds before each piece of text


@dataclass
class Load:
    """The load of one server."""

    url: str
    pid: int
    args: Namespace
    is_tiny: bool
    text: str = field(default_factory=lambda: demo_text().encode("ascii", "ignore").decode())

    def prompt(self, number: int) -> tuple[str, int]:
        """Text and tokens (about); one in four begins like the others of these."""
        draw = random.Random(number)
        longest = self.args.longest
        sizes = (10, min(LONG, longest))
        if number < NUM_LONGEST:
            sizes = (longest, longest)
        elif draw.random() < self.args.long_share:
            sizes = (sizes[1], longest)
        num_tokens = round(sizes[0] * (sizes[1] / sizes[0]) ** draw.random())
        length = num_tokens * (1 if self.is_tiny else 4)  # SmolLM2: about 4 characters a token
        start = draw.randrange(len(self.text) - length) if number % 4 else 0
        return self.text[start : start + length], num_tokens

    def connect(self, client: int = 0, kind: str = "") -> httpx.AsyncClient:
        """Opens the connections of a client."""
        address = f"127.0.1.{1 + client % 250}"
        window = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)] if kind == "slow" else None
        transport = httpx.AsyncHTTPTransport(local_address=address, socket_options=window)
        return httpx.AsyncClient(transport=transport, base_url=self.url, timeout=PATIENCE)

    async def ask(self, http: httpx.AsyncClient, number: int, kind: str = "") -> Outcome:
        """Sends one request and reads its answer."""
        prompt, num_tokens = self.prompt(number)
        outcome = Outcome(number, num_tokens, kind)
        fields = {"prompt": prompt, "seed": number, "max_tokens": self.args.new_tokens}
        fields |= {"temperature": 1.0, "stream": True, "ignore_eos": True}
        form = grammar(number)
        fields |= {"ignore_eos": False, "structured_outputs": form} if form else {}
        leaves_after = number % 10 if kind == "leaves" else None
        before = time.monotonic()
        try:
            async with http.stream("POST", "/v1/completions", json=fields) as answer:
                if answer.status_code in (429, 503, 400 * ("json" in form)):
                    outcome.end = "refused"
                    await asyncio.sleep(0.2)
                    return outcome
                async for line in answer.aiter_lines():
                    if len(outcome.waits) == leaves_after:
                        outcome.end = "left"
                        break
                    if not line.startswith("data: {"):
                        continue
                    [choice] = json.loads(line[6:])["choices"]
                    if choice["text"]:
                        outcome.text += choice["text"]
                        outcome.waits.append(time.monotonic() - before)
                        before = time.monotonic()
                    reason = choice["finish_reason"]
                    if reason == "length" or (reason and re.fullmatch(form["regex"], outcome.text)):
                        outcome.end = "answered"
                    if kind == "slow":
                        await asyncio.sleep(0.05)
                if outcome.end == "lost" or answer.status_code != 200:
                    raise ValueError(f"status {answer.status_code}, and no end")
        except (httpx.HTTPError, ValueError, KeyError) as error:
            outcome.end = "lost"
            log.warning("lost: request %d, a prompt of %d tokens: %r", number, num_tokens, error)
        return outcome

    async def send(self) -> dict[str, Any]:
        """Sends all requests; returns figures of their outcomes."""
        numbers, outcomes = iter(range(self.args.requests)), list[Outcome]()
        a_tenth, mib = max(1, self.args.requests // 10), list[float]()

        async def run_client(client: int) -> None:
            kind = {3: "leaves", 7: "slow"}.get(client % 10, "")
            async with self.connect(client, kind) as http:
                for number in numbers:
                    outcomes.append(await self.ask(http, number, kind))
                    if len(outcomes) % a_tenth == 0:
                        mib.append(self.resident_mib())
                        log.info("%d requests have ended: %s MiB", len(outcomes), mib[-1])

        started = time.monotonic()
        await asyncio.gather(*map(run_client, range(self.args.clients)))
        seconds = round(time.monotonic() - started, 1)
        kinds = ("answered", "left", "refused", "lost")
        result: dict[str, Any] = {end: sum(it.end == end for it in outcomes) for end in kinds}
        result |= await self.check(outcomes)
        timed = [it for it in outcomes if it.end == "answered" and not it.kind]
        mib.append(self.resident_mib())
        result |= {"seconds": seconds, "mib_at_most": max(mib)} | times("", timed)
        result |= times("short_", [it for it in timed if it.num_tokens < 100])
        return result | {"mib_after_a_tenth": mib[0], "mib_at_the_end": mib[-1]}

    async def check(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """Checks for rows that are still busy, and for texts that differ when asked alone."""
        whole = [it for it in outcomes if it.end in ("answered", "left")]
        sample = random.Random(0).sample(whole, min(len(whole), self.args.check))
        differ = []
        async with self.connect() as http:
            await asyncio.sleep(2)  # for the last rows to be free
            busy = (await http.get("/health")).json()["requests"]
            for one in sample:
                again = (await self.ask(http, one.number)).text
                if one.text != (again if one.end == "answered" else again[: len(one.text)]):
                    differ.append(one.number)
        result = {"busy_at_the_end": busy, "asked_again": len(sample)}
        return result | {"texts_that_differ": len(differ), "differ": differ}

    def resident_mib(self) -> float:
        """Memory of the server's process, on Linux."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def grammar(number: int) -> dict[str, Any]:
    """Form of an answer, empty for most; the schemas among them take too long to compile."""
    if number % 100 == 5:
        return {"json": {"type": "integer", "multipleOf": 8_192_000 + number}}
    return {"regex": f"[a-z]{{4}}-[0-9]{{{number % 20}}}"} if number % 10 == 5 else {}


def times(name: str, outcomes: list[Outcome]) -> dict[str, float]:
    """Milliseconds that a half, 95 % and 99 % of the first tokens and of the gaps do not exceed."""
    result: dict[str, float] = {f"{name}prompts": len(outcomes)}
    for what, part in (("first_token", slice(1)), ("gap", slice(1, None))):
        values = sorted(wait for it in outcomes for wait in it.waits[part]) or [0.0]
        for percent in (50, 95, 99):
            milliseconds = 1000 * values[len(values) * percent // 100]
            result[f"{name}{what}_ms_p{percent}"] = round(milliseconds, 1)
    return result


def write_tiny(folder: Path, context: int) -> None:
    """A random Llama whose tokens are the characters of ASCII."""
    symbols = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ", "Ċ"]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *symbols])}
    config = SHAPE | {"vocab_size": len(vocabulary), "max_position_embeddings": context}
    model = Llama(read_config(config, "tiny"), dtype=torch.float32, device=torch.device("meta"))
    torch.manual_seed(0)
    tensors = {
        name: 0.3 * torch.randn(it.shape) + ("norm" in name)
        for name, it in placements(model).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    spelling = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = decoders.ByteLevel()
    spelling.save(str(folder / "tokenizer.json"))


def measure(command: list[str], args: Namespace, is_tiny: bool) -> dict[str, Any]:
    """Starts a server for the load, and ends it by Ctrl-C; returns figures."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threads = {"OMP_NUM_THREADS": "1"} if is_tiny else {}  # two would only wait for each other
    how: dict[str, Any] = {"env": os.environ | threads, "stdout": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--port", str(port)], **how) as server:
        load = Load(f"http://127.0.0.1:{port}", server.pid, args, is_tiny)
        try:
            while True:
                if server.poll() is not None:
                    raise InputError(f"{' '.join(command)} has ended; see what it said above")
                with contextlib.suppress(httpx.ConnectError):
                    httpx.get(f"{load.url}/v1/models", timeout=PATIENCE)
                    break
                time.sleep(0.1)
            result = asyncio.run(load.send())
        finally:
            server.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(90)
            server.kill()  # unless it has ended
    return result | {"exit_code": server.returncode}


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.serve_load", description=__doc__)
    add = parser.add_argument
    add("--model", help="(default: a tiny random one)")
    for name, default in {"clients": 50, "requests": 1000, "new-tokens": 32, "check": 50}.items():
        add(f"--{name}", type=positive, metavar="N", default=default, help="(default: %(default)s)")
    add("--longest", type=positive, metavar="N", help="prompt (default: 100000 if tiny, or 2000)")
    add("--long-share", type=float, metavar="P", default=0.01, help="of prompts over 1000 tokens")
    add("--server-flags", default="--coupled --dtype float32", help="(default: %(default)s)")
    add("--json", action="store_true", help="the figures as JSON on standard output")
    return parser


def run_command(args: Namespace) -> int:
    """Sends the load; returns the exit code."""
    is_tiny = args.model is None
    args.longest = args.longest or (100_000 if is_tiny else 2000)
    context = args.new_tokens + args.longest * (2 if is_tiny else 3) // 2
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder), context)
        flags = f"--model {args.model or folder} --context {context} --quiet".split()
        command = [sys.executable, "-m", "minitri", "serve", *flags, *args.server_flags.split()]
        result = measure(command, args, is_tiny)
    for key, value in result.items():
        print(f"{key.replace('_', ' '):26}{value!s:>18}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    faults = ("lost", "texts_that_differ", "busy_at_the_end", "exit_code")
    return int(any(result[fault] for fault in faults))


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
