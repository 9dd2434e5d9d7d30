"""A tour of the method on real weights: four pictures in one PNG, and a few lines.

    python -m tools.tour --prompt-file novel.txt --out tour.png

1. Guesses that the target accepts, by the tokens that a cache keeps of the text: chunks that are
   retrieved (TriForce, section 4.1), or the first and latest tokens, as StreamingLLM has it. As the
   text goes on, and after a question about a sentence far back in it.
2. What the retrieval cache keeps of the text, layer by layer, and how long that stays right
   (sections 3.2 and 4.1).
3. One step of TriForce: who guessed what, and what each level made of it (section 4.2).
4. What a token costs after texts of several lengths.
"""

import argparse
import math
import statistics
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from minitri import Request
from minitri.apps.cli import arguments
from minitri.apps.cli.boot import load_engine
from minitri.apps.cli.exits import program
from minitri.apps.cli.inputs import read_prompt
from minitri.apps.cli.terminal import LEGEND, colored
from minitri.core.caches.policies import ChunkRetrieval, attention_received
from minitri.core.decoding.level import Level
from minitri.core.decoding.verification import Emitted, Proposal
from minitri.core.errors import InputError
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.engine import Engine
from tools.bench.compare import compare, summarise
from tools.flags import picture
from tools.paper.baselines.policies import speculation_with
from tools.paper.continuation import Continuation
from tools.paper.questions import NEEDLE_TOKENS, hide

WINDOW, CHUNK, NUM_SINKS = 16, 8, 4
"""Tokens that ask together; tokens of a chunk; sinks."""
BUDGETS = (64, 128, 256, 512, 1024, 2048)
"""Tokens that a cache keeps."""
GAMMA1, GAMMA2 = 2, 6
NUMBER, DEPTH, NUM_SAID = 4_815_162, 0.2, 128
"""What the question asks for, where in the text it is, and tokens that the novel goes on for."""
WARM = SamplingParams(0.6, top_p=0.9)
COLORS = {"draft": "#009E73", "retrieval": "#56B4E9", "recovered": "#D55E00", "bonus": "#E69F00"}
MEANINGS = {"draft": "drafter", "retrieval": "retrieval cache"}
MEANINGS |= {"bonus": "target", "recovered": "correction"}
KEPT = (("retrieval", "retrieved", "#56B4E9"), ("streaming", "first and latest", "#D55E00"))
"""Policies, each with its name and color in the picture."""
GRAY = "#bbbbbb"


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(description=__doc__)
    parser.add_flags("MODEL", "draft", "LENGTH")
    parser.add_flags("prompt", "prompt_file", "demo", title="demo")
    parser.add_argument("--out", type=picture, default="tour.png", metavar="FILE.png")
    parser.set_defaults(max_prompt_tokens=8000, max_new_tokens=160, method="triforce")
    return parser


def queries(said: Continuation, layer: int, window: int) -> Tensor:
    """Queries (K, R, D) of the first 16 new tokens, or with window -1 of the last, by KV head."""
    queries_WHD = said.queries_LNHD[layer].split(WINDOW)[window]
    return queries_WHD.unflatten(1, (said.full.keys.shape[2], -1)).transpose(0, 1).flatten(1, 2)


def retrieved(said: Continuation, layer: int, window: int, budget: int) -> tuple[Tensor, Tensor]:
    """Which chunks (K, N) of the prompt the retrieval cache keeps for a window's queries: sinks,
    the latest, and the best by the attention to their mean keys; 1 or 0. And the prompt's keys."""
    keys_KSD = said.full.keys[layer, 0, :, : said.num_prompt // CHUNK * CHUNK]
    chunks_KNMD = keys_KSD.unflatten(1, (-1, CHUNK))
    scores_KN = ChunkRetrieval().scores(layer, 0, queries(said, layer, window), chunks_KNMD).clone()
    recent = min(SpeculationConfig().num_recent_tokens, budget // 4) // CHUNK
    scores_KN[:, 0] = scores_KN[:, scores_KN.shape[1] - recent :] = math.inf
    best_KC = scores_KN.topk(budget // CHUNK).indices
    return torch.zeros_like(scores_KN).scatter(1, best_KC, 1), keys_KSD


def attention_held(said: Continuation, budget: int) -> tuple[float, float]:
    """Attention beyond the sinks that the retrieval cache holds, and a window of as many tokens: of
    the first new tokens to the prompt, in the median layer."""
    by_chunks, by_window = list[float](), list[float]()
    for layer in range(said.model.config.num_layers):
        kept_KN, keys_KSD = retrieved(said, layer, 0, budget)
        scores_KS = attention_received(queries(said, layer, 0), keys_KSD)
        scores_KS[:, :NUM_SINKS] = 0
        scores_KS /= scores_KS.sum(1, keepdim=True)
        per_chunk_KN = scores_KS.unflatten(1, (-1, CHUNK)).sum(2)
        by_chunks.append(float((per_chunk_KN * kept_KN).sum(1).mean()))
        by_window.append(float(scores_KS[:, NUM_SINKS - budget :].sum(1).mean()))
    return statistics.median(by_chunks), statistics.median(by_window)


def draw_accepted(axes: Any, engine: Engine, novel: Continuation) -> str:
    """Draws how many guesses the target accepts after the text, and after a question about it."""
    prompt = novel.tokens[: novel.num_prompt]
    question = hide(engine.tokenizer, prompt, len(prompt), DEPTH, NUMBER)
    answer = Continuation(engine, question.prompt, SamplingParams(), NEEDLE_TOKENS)
    num_digits = len(engine.tokenizer.encode(str(NUMBER)))
    budgets = [budget for budget in BUDGETS if budget <= len(prompt) // 3]
    cases = (("the text goes on", novel, NUM_SAID, "-"), ("a question", answer, num_digits, "--"))
    report = ""
    for title, said, num_said, style in cases:
        held = attention_held(said, budgets[-1])
        for (policy, label, color), mass in zip(KEPT, held, strict=True):
            rates = []
            for budget in budgets:
                settings = SpeculationConfig("retrieval", gamma2=GAMMA2, budget=budget)
                how = speculation_with(policy, settings)
                [probs_NV] = said.by_cache(how, GAMMA2, engine.model)
                rates.append(100 * said.rate(probs_NV[:num_said], GAMMA2).mean)
            label = f"{title}: {label}"
            axes.plot(budgets, rates, style, color=color, marker="o", markersize=4, label=label)
            shares = " ".join(f"{rate:.0f}" for rate in rates)
            report += f"\n   {label}: {shares} % accepted; attention beyond the sinks {mass:.0%}"
    axes.set(xscale="log", ylim=(-3, 103), xlabel="tokens kept", xticks=budgets)
    axes.set_xticklabels(map(str, budgets))
    axes.minorticks_off()
    axes.set_title("1  guesses that the target accepts, %", loc="left")
    axes.legend(frameon=False, fontsize=8, loc="center right")
    digits = engine.tokenizer.decode(answer.tokens[len(question.prompt) :][:num_digits])
    return (
        f"Guesses with {budgets} tokens kept, and the attention (median layer) that the most of "
        f"these hold. Asked for {NUMBER}, the target says {digits}.{report}"
    )


def draw_choice(axes: Any, said: Continuation, budget: int) -> str:
    """Draws the chunks that each layer and KV head keeps in the end, and kept at first."""
    rows, shared = list[Tensor](), list[float]()
    num_layers = said.model.config.num_layers
    for layer in range(num_layers):
        now_KN, before_KN = (retrieved(said, layer, window, budget)[0] for window in (-1, 0))
        shared.append(float((now_KN * before_KN).sum() / now_KN.sum()))
        rows.append(now_KN + now_KN * before_KN)  # 1: new, 2: kept then, too
    picture = torch.cat(rows).float().numpy()
    from matplotlib.colors import ListedColormap

    extent = (0, picture.shape[1] * CHUNK, num_layers, 0)
    colors = ListedColormap(["#f4f4f4", "#E69F00", "#56B4E9"])
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "vmin": 0, "vmax": 2}
    axes.imshow(picture, extent=extent, cmap=colors, **how)
    axes.set(xlabel="position in the text, tokens", ylabel="layer")
    axes.set_title("2  chunks in the retrieval cache", loc="left")
    for label, color in (("kept before, too", "#56B4E9"), ("new", "#E69F00")):
        axes.plot([], [], "s", color=color, label=label)
    axes.legend(frameon=True, fontsize=8, loc="lower center", ncol=2)
    return (
        f"The retrieval cache keeps {budget} of {picture.shape[1] * CHUNK} tokens, other ones for "
        f"every KV head; {statistics.median(shared):.0%} of its chunks (median layer) would have "
        f"been chosen {NUM_SAID - WINDOW} tokens before, so it serves for a while."
    )


def speculation(method: str, budget: int) -> SpeculationConfig:
    return SpeculationConfig(method, gamma1=GAMMA1, gamma2=GAMMA2, budget=budget)


class Pass(NamedTuple):
    """What a level made of a proposal: tokens, each with the stage that guessed it."""

    level: str
    accepted: list[tuple[int, str]]
    rejected: list[tuple[int, str]]
    own: tuple[int, str]


def draw_step(axes: Any, engine: Engine, prompt: list[int], num_new: int, budget: int) -> str:
    """Prints a text, each token in the color of the stage that guessed it; draws a step of it."""
    steps, verify = [list[Pass]()], Level.verify

    def watched(level: Level, rows: Any, active: Any, proposal: Proposal) -> list[Emitted]:
        [emitted] = verify(level, rows, active, proposal)
        *_, token = emitted.tokens
        is_target, num_accepted = level.name == "target", len(emitted.tokens) - 1
        own = token, emitted.origins[-1] if is_target else level.name
        guesses = [*zip(proposal.tokens_BN[0].tolist(), proposal.origins[0], strict=True)]
        steps[-1].append(Pass(level.name, guesses[:num_accepted], guesses[num_accepted:], own))
        if is_target:
            steps.append([])
        return [emitted]

    generation = GenerationConfig(num_new, ignore_eos=True)
    settings: dict[str, Any] = {"sampling": WARM, "speculation": speculation("triforce", budget)}
    with mock.patch.object(Level, "verify", watched):
        end = engine.complete(prompt, seed=1, generation=generation, **settings)
    print("".join(map(colored, end.tokens)))
    print(LEGEND)
    step = max(steps, key=lambda passes: len({one.level for one in passes if one.rejected}))
    rows = []
    for one in step:
        row = [(f"{one.level:10}", "#555555")]
        rejected = [(token, "rejected") for token, _ in one.rejected]
        for token, origin in (*one.accepted, *rejected, one.own):
            row.append((repr(engine.tokenizer.decode([token]))[1:-1], COLORS.get(origin, GRAY)))
        rows.append(row)
    legend = [(f"{meaning} ", COLORS[origin]) for origin, meaning in MEANINGS.items()]
    rows += [[], [*legend, ("rejected", GRAY)]]
    for y, row in enumerate(rows):
        x = 0
        for word, color in row:
            axes.text(x, y, word, color=color, fontsize=8, family="monospace")
            x += len(word) + 1
    axes.set(xlim=(0, 66), ylim=(len(rows), -1))
    axes.axis("off")
    axes.set_title("3  one step: what each level verifies and adds", loc="left")
    num_guessed = sum(token.origin not in ("recovered", "bonus") for token in end.tokens)
    target = end.stats.stages[-1]
    return (
        f"{num_guessed / num_new:.0%} of {num_new} tokens were guessed; the target accepted "
        f"{target.acceptance_rate or 0:.0%} of what it was proposed and ran "
        f"{target.num_rounds} times for them. Drawn is a step with rejected guesses."
    )


def draw_speed(axes: Any, engine: Engine, prompt: list[int], num_new: int) -> str:
    """Draws milliseconds per token after several lengths: medians of three turns."""
    lengths = [len(prompt) >> 3, len(prompt) >> 2, len(prompt) >> 1, len(prompt)]
    colors = {"autoregressive": "#000000", "retrieval": "#56B4E9", "triforce": "#009E73"}
    rows = []
    for length in lengths:
        budget = max(CHUNK, min(1024, length // 4 // CHUNK * CHUNK))
        generation = GenerationConfig(num_new, ignore_eos=True)
        request = Request(prompt[:length], sampling=WARM, generation=generation)
        methods = {method: speculation(method, budget) for method in colors}
        result = summarise(compare(engine, [request], range(3), methods))
        rows.append([result[method]["ms_per_token"]["median"] for method in colors])
    for times, (method, color) in zip(zip(*rows, strict=True), colors.items(), strict=True):
        axes.plot(lengths, times, color=color, marker="o", markersize=4, label=method)
    axes.set(xlabel="text, tokens", ylim=(0, None))
    axes.set_title("4  milliseconds per token", loc="left")
    axes.legend(frameon=False, fontsize=8)
    plain, *guessing = rows[-1]
    return (
        f"After {lengths[-1]} tokens a token takes {plain:.1f} ms by the target alone and "
        f"{min(guessing):.1f} ms with guesses, {plain / min(guessing):.2f} times as fast; after "
        f"{lengths[0]} tokens {rows[0][0]:.1f} ms and {min(rows[0][1:]):.1f} ms."
    )


def draw(engine: Engine, prompt: list[int], num_new: int, out: Path) -> None:
    """Draws all four pictures; prints a sentence about each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.6), layout="constrained")
    (accepted, choice), (step, speed) = figure.subplots(2, 2)
    with torch.inference_mode():
        novel = Continuation(engine, prompt, WARM, NUM_SAID)
        budget = SpeculationConfig().budget_for(len(prompt))
        print("1.", draw_accepted(accepted, engine, novel), flush=True)
        print("2.", draw_choice(choice, novel, budget), flush=True)
    print("3.", draw_step(step, engine, prompt, num_new, budget), flush=True)
    print("4.", draw_speed(speed, engine, prompt, num_new), flush=True)
    for axes in (accepted, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font does not have
        figure.savefig(out, dpi=110)
    print(f"drawn: {out}")


def run_command(args: argparse.Namespace) -> None:
    engine, [prompt] = load_engine(args, read_prompt(args.prompt_file, args.prompt))
    if len(prompt) < 600:
        raise InputError(f"the text has {len(prompt)} tokens, too few to see anything; give 600")
    draw(engine, prompt, args.max_new_tokens, args.out)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
