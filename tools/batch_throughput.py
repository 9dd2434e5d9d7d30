"""What batches gain: one text after the other, all at once, and many through few places.

    python tools/batch_throughput.py --prompt-file novel.txt --prompt-file other.txt

Six prompts of 500 to 3,000 tokens, cut from the files at different places, are continued by the
model alone one after the other and as one batch, and by the cascade as one batch. Then 40 prompts
pass through 6 places; the ideal is a batch in which no place is ever empty. Tokens per second are
those of decoding, medians of several interleaved rounds. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from minitri import Engine, GenerationConfig, Request, SamplingParams, SpeculationConfig, load

LENGTHS = (500, 1000, 1500, 2000, 2500, 3000)
NUM_ROWS = len(LENGTHS)


def cut_prompts(engine: Engine, files: list[str], num: int) -> list[list[int]]:
    """Prompts of LENGTHS in turn, each from another place."""
    texts = [Path(file).read_text(encoding="utf-8") for file in files]
    prompts = []
    for i in range(num):
        text, length = texts[i % len(texts)], LENGTHS[i % NUM_ROWS]
        start = len(text) // (num + 1) * i
        prompts.append(engine.tokenizer.encode(text[start : start + 8 * length])[:length])
    return prompts


def tokens_per_second(
    engine: Engine, prompts: list[list[int]], num_new: list[int], batch_size: int, method: str
) -> tuple[float, int]:
    """Decoded tokens per second, and steps."""
    sampling = SamplingParams(temperature=0.6, top_p=0.9)
    requests = [
        Request(prompt, seed, sampling, GenerationConfig(new, ignore_eos=True))
        for seed, (prompt, new) in enumerate(zip(prompts, num_new, strict=True))
    ]
    run = engine.stream(
        requests, batch_size=batch_size, speculation=SpeculationConfig(method, timed=True)
    )
    for _ in run:
        pass
    stats = run.stats
    return stats.num_decoded_tokens / stats.decode_seconds, sum(stats.steps_per_plan.values())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--prompt-file", action="append", required=True, metavar="FILE")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="N", help="per text")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    parser.add_argument("--methods", default="auto,triforce,retrieval,naive", metavar="A,B")
    args = parser.parse_args()
    engine = load(args.model, dtype="bfloat16")
    six = cut_prompts(engine, args.prompt_file, NUM_ROWS)
    new = [args.new_tokens] * NUM_ROWS
    cases = {"one after the other": (1, "autoregressive"), "batch": (NUM_ROWS, "autoregressive")}
    cases |= {f"batch, {name}": (NUM_ROWS, name) for name in args.methods.split(",")}
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(args.rounds):
        for name, (rows, method) in cases.items():
            speeds[name].append(tokens_per_second(engine, six, new, rows, method)[0])
            print(f"round {number}: {name} {speeds[name][-1]:.1f} tokens/s", file=sys.stderr)
    many = cut_prompts(engine, args.prompt_file, 40)
    lengths = [args.new_tokens // 2 + (17 * i) % args.new_tokens for i in range(40)]
    speed, steps = tokens_per_second(engine, many, lengths, NUM_ROWS, "autoregressive")
    occupancy = (sum(lengths) - len(lengths)) / (NUM_ROWS * steps)
    print(f"{engine.config.name}, bfloat16, {args.new_tokens} tokens each, T=0.6, top-p 0.9")
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        gain = medians[name] / medians["batch"]
        span = f"({min(values):.1f} to {max(values):.1f})"
        print(f"{name:22s}{medians[name]:8.1f} tokens/s {span:18s} {gain:.2f} of the batch")
    print(
        f"40 through {NUM_ROWS} places     {speed:8.1f} tokens/s; places are full {occupancy:.3f}"
    )
    print(json.dumps({"tokens_per_second": speeds, "through": speed, "occupancy": occupancy}))


if __name__ == "__main__":
    main()
