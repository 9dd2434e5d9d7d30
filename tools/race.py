"""A race as an animated picture: autoregressive decoding next to minitri, writing the same words.

    python -m tools.race --prompt-file novel.txt --out race.gif

Both go on with the same prompt, in turns; the first ones, which read it, are not timed. The picture
replays the turn of median time of each on one clock. Texts are seed-coupled or greedy, so equal.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from minitri import Engine, InputError, Token
from minitri.apps.cli import arguments, boot, exits, inputs
from tools.flags import picture
from tools.paper.study import machine
from tools.tour import COLORS, MEANINGS

Lane = list[tuple[float, Token]]
"""A run: its tokens, each with the seconds from the start until its event."""
TURNS, RATE, HOLD_MS, MOST_BYTES = 3, 10, 3000, 1_500_000
"""Timed turns of each method; frames a second; how long the last one stays; size of the file."""
SIZE, EDGES, BREAK, LINE, NUM_LINES = (960, 420), (24, 492), 360, 23, 11
"""Pixels: the picture, its columns, where in one a space first ends a line, a line; most lines."""


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(prog="python -m tools.race", description=__doc__)
    parser.add_flags("MODEL", "draft", "method", "LENGTH", "temperature", "seed")
    parser.add_flags("prompt", "prompt_file", "demo", title="demo")
    parser.add_argument("--out", type=picture, default="race.gif", metavar="FILE.gif")
    parser.set_defaults(max_prompt_tokens=7900, max_new_tokens=150, temperature=0.6, seed=0)
    return parser


def run_turns(engine: Engine, prompt: list[int], args: argparse.Namespace) -> dict[str, Lane]:
    """Runs both methods in turns; the turn of median time of each. Raises `InputError`."""
    how: dict[str, Any] = {"temperature": args.temperature, "coupled": args.temperature > 0}
    how |= {"max_new_tokens": args.max_new_tokens, "ignore_eos": True, "timed": True}
    methods = {"autoregressive": "autoregressive", f"minitri, {args.method}": args.method}
    turns: dict[str, list[Lane]] = {name: [] for name in methods}
    for number in range(1 + TURNS):
        for name in [*turns][:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            run = engine.generate(prompt, seed=args.seed, method=methods[name], **how)
            timed = ((time.perf_counter() - started, event) for event in run)
            turns[name].append([(at, event) for at, event in timed if isinstance(event, Token)])
    lanes = itertools.chain(*turns.values())
    if len({tuple(token.token_id for _, token in lane) for lane in lanes}) > 1:
        raise InputError("rounding decided a near-tie otherwise in one run; give --dtype float32")
    ranked = {name: sorted(runs[1:], key=lambda run: run[-1][0]) for name, runs in turns.items()}
    return {name: runs[TURNS // 2] for name, runs in ranked.items()}


def draw(lanes: dict[str, Lane], caption: str, out: Path) -> None:
    """Writes the picture: each frame has the tokens that had come by its time."""
    from PIL import Image, ImageDraw, ImageFont

    small, font, large = map(ImageFont.load_default, (13, 16, 22))
    texts = [token.text.replace("\n", " ") for _, token in next(iter(lanes.values()))]
    x, y, places, frames = 0.0, 0, list[tuple[float, int]](), list[Image.Image]()
    for text in texts:  # both columns have it at the same places
        if x > BREAK and text.startswith(" "):
            x, y = 0.0, y + 1
        places.append((x, y))
        x += font.getlength(text)
    end = max(lane[-1][0] for lane in lanes.values())
    for seconds in (number / RATE for number in range(int(end * RATE) + 2)):
        frames.append(Image.new("RGB", SIZE, "white"))
        write = ImageDraw.Draw(frames[-1]).text
        write((936, 14), f"{seconds:.1f} s", "black", large, "ra")
        for left, colors, (name, lane) in zip(EDGES, ({}, COLORS), lanes.items(), strict=True):
            came = [colors.get(token.origin, "black") for at, token in lane if at <= seconds]
            spent = min(seconds, lane[-1][0]) or 1.0
            speed = f"{len(came)} tokens in {spent:.1f} s, {len(came) / spent:.1f} tokens/s"
            write((left, 14), name, "black", large)
            write((left, 316), speed, "black", font)
            lift = max(0, places[len(came) - 1][1] - NUM_LINES + 1)  # lines that make room
            for color, text, (x, y) in zip(came, texts, places, strict=False):
                if y >= lift:
                    write((left + x, 52 + LINE * (y - lift)), text, color, font)
        for number, (origin, meaning) in enumerate(MEANINGS.items()):
            write((EDGES[1] + 110 * number, 344), meaning, COLORS[origin], small)
        write((EDGES[0], 384), caption, "gray", small)
    palette = frames[-1].quantize(64, Image.Quantize.MAXCOVERAGE)
    first, *rest = (one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames)
    milliseconds = [1000 // RATE] * len(rest) + [HOLD_MS]
    first.save(out, save_all=True, append_images=rest, duration=milliseconds, loop=0)


def run_command(args: argparse.Namespace) -> None:
    engine, [prompt] = boot.load_engine(args, inputs.read_prompt(args.prompt_file, args.prompt))
    lanes = run_turns(engine, prompt, args)
    model = f"{engine.config.name} of {engine.model.num_bytes / 1e6:.0f} MB"
    caption = f"{args.max_new_tokens} tokens after {len(prompt):,}, T = {args.temperature:g}; "
    caption += f"{model}; {machine()}; {time.strftime('%d %b %Y')}"
    draw(lanes, caption, args.out)
    if (size := args.out.stat().st_size) > MOST_BYTES:
        raise InputError(f"{args.out} has {size} bytes, over {MOST_BYTES}; lower --max-new-tokens")
    print("equal texts:", caption)
    print(*(f"{name}: {lane[-1][0]:.2f} s" for name, lane in lanes.items()), sep="\n")


main = exits.program(build_parser, run_command)

if __name__ == "__main__":
    main()
