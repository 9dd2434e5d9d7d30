"""The measuring tools run on a tiny model, print a table, and end in a JSON line of figures."""

import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from minitri.core.decoding.verification import Proposal
from minitri.core.roofline import weights_per_pass
from minitri.core.settings import GenerationConfig, SpeculationConfig
from tests.conftest import SENTENCES, write_hf_folder
from tests.core.rigs import CPU, tiny_config
from tools import serve_load, tour
from tools.bench import __main__ as bench
from tools.bench import floor
from tools.bench.synthetic import Setup, SyntheticSource, decode, random_model, sweep_contexts


@pytest.fixture(scope="session")
def texts(tmp_path_factory, long_text) -> list[str]:
    files = [tmp_path_factory.mktemp("texts") / name for name in ("one.txt", "two.txt")]
    for number, file in enumerate(files):
        file.write_text(long_text[3000 + 2000 * number :][:8000], encoding="utf-8")
    return [*map(str, files)]


@pytest.fixture
def measure(folder, texts, call):
    """Runs a tool on the tiny model and the first text; gives its table and its figures."""

    def measure(program, flags: str) -> tuple[list[str], dict]:
        always = f"--model {folder} --dtype float32 --prompt-file {texts[0]} {flags}"
        done = call(program.main, *always.split())
        assert done.code == 0
        return done.out.splitlines()[:-1], done.json

    return measure


SHORT = "--prompt-tokens 200 --new-tokens 24"


def test_the_floor_is_measured_by_runs_that_read_the_whole_prompt(measure, monkeypatch):
    """Else the second would find the prompt in the cache, and its prefill would take no time."""
    runs, decoding = [], floor.plain_decoding
    spy = lambda *args: runs.append(decoding(*args)) or runs[-1]  # noqa: E731
    monkeypatch.setattr(floor, "plain_decoding", spy)
    measure(bench, f"{SHORT} --repeats 3 --profile --quiet --json")
    assert [run.stats.num_prefilled_tokens for run in runs] == [200] * 4


def test_the_tour_draws_four_pictures_and_says_what_they_show(tmp_path, call):
    model = write_hf_folder(tmp_path / "tiny", max_position_embeddings=2048)
    text, out = tmp_path / "text.txt", tmp_path / "tour.png"
    text.write_text(" ".join(SENTENCES) * 40)
    flags = f"--model {model} --device cpu --prompt-file {text} --out {out} -q"
    flags += " --max-prompt-tokens 700 --max-new-tokens 12"
    code, said, _ = call(tour.main, *flags.split())
    assert code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    best, kept, _ = (int(it) for it in re.findall(r"(\d+)%", said.splitlines()[0]))
    assert 100 >= best >= kept > 0
    assert re.search(r"3\. \d+% of 12 tokens were guessed", said)


CONFIG = tiny_config()


def setup_of(method: str, rates: tuple[float, float], draft=CONFIG) -> Setup:
    speculation = SpeculationConfig(method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=40)
    generation = GenerationConfig(24, ignore_eos=True)
    return Setup(CONFIG, draft, speculation, generation, rates, torch.float32, CPU)


@pytest.mark.parametrize("rate", [0.0, 0.46, 0.92, 1.0])
def test_guesses_are_accepted_at_the_rate_asked_for(rate):
    """Of 4,000 first guesses: within 4 standard deviations, at odds of 1 : 15,000."""
    source, probs = SyntheticSource(rate, 3), torch.full((1, 4, 8), 1 / 8)
    proposal = Proposal.of([[1, 2, 3]], probs[:, :3], [["draft"] * 3])
    counts = [len(source.verify(proposal, probs, [0], [True])[0]) - 1 for _ in range(4000)]
    first, second = (sum(count > n for count in counts) for n in (0, 1))
    assert abs(first / 4000 - rate) <= 4 * (rate * (1 - rate) / 4000) ** 0.5
    assert abs(second / max(1, first) - rate) <= 0.06


@pytest.mark.parametrize(
    ("method", "wanted"), [("autoregressive", 1), ("naive", 3), ("retrieval", 4), ("triforce", 4)]
)
def test_a_shape_decodes_by_every_method(method, wanted):
    """With certain guesses a step makes as many tokens as a block can hold, and one more."""
    setup = setup_of(method, (1.0, 1.0))
    target, draft = (random_model(CONFIG, setup) for _ in range(2))
    untied = CONFIG.vocab_size * CONFIG.hidden_size * 4
    assert 4 * weights_per_pass(CONFIG) == target.num_bytes - untied
    result = decode(target, draft, 100, setup, method)
    assert result["tokens_per_step"] == wanted
    assert result["synthetic"] is True
    assert result["ms_per_token"] > 0


def test_a_sweep_says_synthetic_in_every_row_and_what_was_predicted(capsys):
    result = sweep_contexts(setup_of("triforce", (0.5, 0.9), draft=None), [64, 128])
    assert [row["context"] for row in result["rows"]] == [64, 128]
    runs = [row[name] for row in result["rows"] for name in ("autoregressive", "cascade")]
    assert all(run["synthetic"] for run in [result, *runs])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("measured ms") for line in lines)
    assert sum(line.startswith("target  ") for line in lines) == 2


def test_a_load_loses_no_request_and_changes_no_text(call):
    """Of two clients in ten one leaves, one reads slowly; every answer is asked for again."""
    flags = "--requests 20 --clients 10 --longest 300 --new-tokens 12 --check 20 --json -q"
    code, out, err = call(serve_load.main, *flags.split())
    assert code == 0, err
    result = json.loads(out)["minitri"]
    assert result["answered"] + result["left"] == result["asked_again"] == 20
    assert result["left"] >= 1
    assert result["lost"] == result["texts_that_differ"] == result["busy_at_the_end"] == 0
    assert result["short_prompts"] > 0
    assert result["gap_ms_p50"] <= result["gap_ms_p95"] <= result["gap_ms_p99"]
    assert result["mib_at_the_end"] > 0
    assert "texts that differ" in err


class FaultyServer(BaseHTTPRequestHandler):
    """By the seed: an answer, none, one that ends too early, an error within it, a refusal; and
    then a text of its own for each time that one is asked for."""

    asked = itertools.count()

    def do_GET(self):
        self.say(200, b'{"requests": 1}')

    def do_POST(self):
        length = int(self.headers["content-length"])
        seed = json.loads(self.rfile.read(length))["seed"]
        piece = {"text": "a" if seed < 5 else str(next(self.asked)), "finish_reason": None}
        pieces = [{"choices": [piece]}, {"choices": [{"text": "", "finish_reason": "length"}]}]
        if seed in (2, 3):
            pieces[1:] = [{"error": {"message": "a bug"}}] * (seed == 3)
        events = b"".join(b"data: %b\n\n" % json.dumps(it).encode() for it in pieces)
        self.say({1: 500, 4: 503}.get(seed, 200), events)

    def say(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_load_tells_what_a_faulty_server_does(call):
    server = ThreadingHTTPServer(("127.0.0.1", 0), FaultyServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = f"--url http://127.0.0.1:{server.server_port} --requests 6 --clients 1 --json -q"
    done = call(serve_load.main, *flags.split())
    server.shutdown()
    server.server_close()
    result = done.json["server"]
    assert done.code == 1
    ends = {name: result[name] for name in ("answered", "left", "refused", "lost")}
    assert ends == {"answered": 2, "left": 0, "refused": 1, "lost": 3}
    assert [line.split(",")[0] for line in done.err.splitlines()[:3]] == [
        f"lost: request {number}" for number in (1, 2, 3)
    ]
    assert result["differ"] == [5]
    assert result["busy_at_the_end"] == 1
