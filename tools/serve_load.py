"""Many clients at a server: is a row lost, does memory grow, does load change a text?

    python tools/serve_load.py --model smollm2-135m --clients 50 --requests 1000

Starts `python -m minitri.serve --coupled --dtype float32`. Eight texts are asked for alone, at
temperature 1 with a seed each; then the clients ask for them again and again, half of them as a
stream, and 3 of 50 requests are left in the middle. A row is lost if one is still busy at the end.
Tokens per second and latencies are those of cached prompts, which the server has read before.
Memory is that of the server's process, after a tenth of the requests and at the end. Ends with
Ctrl-C for the server. The last line is JSON.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

NUM_TEXTS = 8
PROMPT = "The harbour was quiet in the morning, and nobody had seen the boats leave. "


def ask(client: openai.OpenAI, model: str, number: int, num_new: int) -> tuple[str | None, float]:
    """The text of a request, None if it is left in the middle, and seconds."""
    which, started = number % NUM_TEXTS, time.monotonic()
    fields: dict[str, Any] = {
        "model": model,
        "prompt": f"{which}. " + PROMPT * (1 + which),
        "seed": which,
        "max_tokens": num_new,
        "extra_body": {"ignore_eos": True},
    }
    text = ""
    if number % 2:
        with client.completions.create(**fields, stream=True) as chunks:
            for chunk in chunks:
                text += chunk.choices[0].text
                if number % 50 in (7, 23, 41):
                    return None, 0.0
    else:
        text = client.completions.create(**fields).choices[0].text
    return text, time.monotonic() - started


def num_open(client: openai.OpenAI) -> int:
    """Requests that run or wait."""
    return httpx.get(str(client.base_url).replace("/v1/", "/health")).json()["requests"]


def resident_mib(pid: int) -> float:
    """Memory of a process, on Linux."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def send_all(client: openai.OpenAI, args: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Sends all requests; what became of them."""
    model, num_new = client.models.list().data[0].id, args.new_tokens
    alone = [ask(client, model, number, num_new)[0] for number in range(8, 8 + NUM_TEXTS)]
    started, num_first = time.monotonic(), args.requests // 10
    answers: list[tuple[str | None, float]] = []
    with ThreadPoolExecutor(args.clients) as clients:
        for numbers in (range(num_first), range(num_first, args.requests)):
            answers += clients.map(lambda n: ask(client, model, n, num_new), numbers)
            if numbers.start == 0:
                mib_first = resident_mib(pid)
    seconds = time.monotonic() - started
    deadline = time.monotonic() + 30
    while (lost := num_open(client)) and time.monotonic() < deadline:
        time.sleep(0.1)
    texts = [text for text, _ in answers]
    whole = [number for number, text in enumerate(texts) if text is not None]
    latencies = [seconds for _, seconds in answers if seconds]
    return {
        "requests": len(texts),
        "left": len(texts) - len(whole),
        "texts_that_differ": sum(texts[n] != alone[n % NUM_TEXTS] for n in whole),
        "rows_lost": lost,
        "tokens_per_second_cached": round(len(whole) * num_new / seconds, 1),
        "median_seconds_cached": round(statistics.median(latencies), 3),
        "mib_after_a_tenth": round(mib_first, 1),
        "mib_at_the_end": round(resident_mib(pid), 1),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    for name, default in (("clients", 50), ("requests", 1000), ("new-tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, help="(default: %(default)s)")
    args = parser.parse_args()
    command = [sys.executable, "-m", "minitri.serve", "--model", args.model, "--port"]
    command += [str(args.port), "--coupled", "--dtype", "float32", "--context", "512", "--quiet"]
    with subprocess.Popen(command) as server:
        url = f"http://127.0.0.1:{args.port}"
        try:
            for _ in range(600):
                try:
                    httpx.get(f"{url}/health", timeout=300)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                result = send_all(client, args, server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            result_code = server.wait(90)
    result["exit_code"] = result_code
    for name, value in result.items():
        print(f"{name.replace('_', ' '):24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
