"""Does `--method auto` ever lose? It next to autoregressive decoding in 40 settings.

    python tools/auto_in_forty_settings.py --prompt-file novel.txt

Five kinds of text (a novel, Python's source, a question about the novel, a numbered list, JSON) of
1,000, 4,000 and 8,000 tokens at temperatures 0 and 1.2; novel and code of 16,000 and novel and list
of 32,000, with RoPE scaling, at some temperatures. Every prompt is read once; then both methods
write 128 tokens in turns. A gain is the seconds of autoregressive decoding over those of auto,
added up over the turns, from the first written token to the last, or to the 64th. Prints a line per
setting and a summary; the last line is JSON. It takes 15 minutes on 2 cores.
"""

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from minitri import (
    Engine,
    GenerationConfig,
    Request,
    SamplingParams,
    SpeculationConfig,
    Token,
    load,
)

NUM_NEW, FIRST = 128, 64
METHODS = ("autoregressive", "auto")
SHORT = [
    (kind, num, temperature)
    for num in (1000, 4000, 8000)
    for kind in ("novel", "code", "chat", "list", "JSON")
    for temperature in (0.0, 1.2)
]
LONG = [(kind, 16000, t) for kind in ("novel", "code") for t in (0.0, 0.6, 1.2)]
LONG += [("novel", 32000, 0.0), ("novel", 32000, 0.6), ("novel", 32000, 1.2), ("list", 32000, 0.6)]
MODULES = ("argparse", "inspect", "typing", "doctest", "tarfile", "ast", "pdb", "datetime")


def text_of(kind: str, novel: str, engine: Engine, num_tokens: int) -> str:
    """At least `num_tokens` of a text that goes on after them, where its kind allows that."""
    sentences = [" ".join(it.split()) for it in novel.split(".") if len(it.split()) > 4]
    if kind == "code":
        return "".join(inspect.getsource(__import__(name)) for name in MODULES)
    if kind == "chat":
        told = engine.tokenizer.encode(novel)[: num_tokens - 60]
        question = f"{engine.tokenizer.decode(told)}\n\nWho are the people in this text?"
        template = engine.tokenizer.chat_template
        assert template is not None
        return template.render([{"role": "user", "content": question}])
    if kind == "list":
        return "\n".join(f"{i}. {it}" for i, it in enumerate(sentences, 1))
    records = [
        {"id": i, "name": it.split()[0], "words": len(it.split()), "tags": it.split()[1:4]}
        for i, it in enumerate(sentences)
    ]
    return json.dumps(records, indent=1) if kind == "JSON" else novel


def seconds(engine: Engine, prompt: list[int], temperature: float, method: str) -> list[float]:
    """Until the 64th token and until the last, from the first on."""
    request = Request(
        prompt,
        0,
        SamplingParams(temperature, top_p=0.95),
        GenerationConfig(NUM_NEW, ignore_eos=True),
    )
    times = [
        time.perf_counter()
        for event in engine.stream([request], speculation=SpeculationConfig(method, timed=True))
        if isinstance(event, Token)
    ]
    return [times[FIRST] - times[0], times[-1] - times[0]]


def gains(
    engine: Engine, novel: str, settings: list[tuple[str, int, float]], turns: int
) -> Iterator[tuple[str, float, float]]:
    """Of every setting its name and what auto gains in the first 64 tokens, and in all."""
    for kind, num_tokens, temperature in settings:
        text = text_of(kind, novel, engine, num_tokens)
        prompt = engine.tokenizer.encode(text)[:num_tokens]
        seconds(engine, prompt, temperature, "auto")  # reads the prompt
        spent = {name: [0.0, 0.0] for name in METHODS}
        for turn in range(turns):
            for name in METHODS[:: 1 - 2 * (turn % 2)]:
                times = seconds(engine, prompt, temperature, name)
                spent[name] = [a + b for a, b in zip(spent[name], times, strict=True)]
        first, whole = (spent["autoregressive"][i] / spent["auto"][i] for i in range(2))
        name = f"{kind}, {len(prompt)} tokens, T {temperature:g}"
        ms = [1000 * spent[it][1] / turns / (NUM_NEW - 1) for it in METHODS]
        print(f"{name:28s}{ms[0]:7.1f}{ms[1]:7.1f} ms {whole:5.2f} {first:5.2f}", flush=True)
        yield name, first, whole


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--prompt-file", required=True, metavar="FILE")
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="(default: 2)")
    args = parser.parse_args()
    novel = Path(args.prompt_file).read_text(encoding="utf-8")
    print("setting, ms/token autoregressive and auto, gain of all tokens and of the first 64")
    results: list[tuple[str, float, float]] = []
    for settings, scaling in ((SHORT, None), (LONG, "yarn:4")):
        engine = load(args.model, dtype="bfloat16", rope_scaling=scaling)
        results += gains(engine, novel, settings, args.turns)
        engine.close()
    for text, index in (("all tokens", 2), ("first 64", 1)):
        values = [float(result[index]) for result in results]
        low = sum(value < 0.98 for value in values)
        print(
            f"{text}: median {statistics.median(values):.2f} ({min(values):.2f} to "
            f"{max(values):.2f}), {low} of {len(values)} below 0.98",
            file=sys.stderr,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
