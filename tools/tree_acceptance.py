"""How far trees of guesses lead: accepted tokens a step, by shape and temperature.

    python tools/tree_acceptance.py --prompt-file novel.txt --prompt-file other.txt

The drafter guesses chains, independent sequences and Sequoia trees of equally many nodes, which the
target verifies. Printed are tokens per step, and how fast each shape would be at that on a GPU, by
bytes over bandwidth. The last line is JSON.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig, load
from minitri.memory import Models
from minitri.plan import config_of
from minitri.requests import Request
from minitri.roofline import Machine, Workload
from minitri.settings import StepPlan
from minitri.stack import Stack
from minitri.trees.shape import sequences, shape_of
from tools.runs import begin

GPU = Machine(4e12, 4e12, 50e9, seconds_per_layer=0.02e-3, share_per_extra_token=0.004)
"""An H200 with graphs; a token more of a block costs what its arithmetic does."""


@torch.inference_mode()
def run(
    engine: Engine,
    prompt: list[int],
    seed: int,
    sampling: SamplingParams,
    plan: StepPlan,
    num_new: int,
) -> Stack:
    """A session that has made `num_new` tokens by this plan."""
    speculation = SpeculationConfig("naive", gamma1=plan.gamma1, tree=plan.tree)
    request = Request(prompt, seed, sampling, GenerationConfig(num_new))
    models = Models(engine.model, engine.model, engine.models.draft)
    session = begin(models, [request], speculation)
    for _ in session.prefill(0):
        pass
    session.start([0])
    while len(session.sequences[0]) < len(prompt) + num_new:
        session.step()
    return session


def evaluate(
    sessions: list[Stack], plan: StepPlan, costs: Callable[[str, float], float]
) -> dict[str, float]:
    """Tokens a step, and what they give on a GPU, if passes cost so much there."""
    levels = [session.stats.levels[-1] for session in sessions]
    steps = sum(level.num_rounds for level in levels)
    measured = 1 + sum(level.num_accepted_tokens for level in levels) / steps
    shape = shape_of(plan) if plan.tree else sequences(1, plan.gamma1)
    known = itertools.accumulate(shape.sizes[:-1])
    drafting = sum(costs("draft", max(nodes - 2, 0)) for nodes in known)
    seconds = drafting + costs("target", len(shape) - 1)
    return {"tokens_per_step": measured, "gpu_speedup": measured * costs("target", 0) / seconds}


def shapes(depth: int) -> dict[str, StepPlan]:
    """What is compared, by name."""
    plans = {"chain": StepPlan("naive", depth)}
    for nodes in (2 * depth, 4 * depth, 8 * depth):
        width = f"{nodes // depth}x{depth}"
        plans[f"{width} sequences"] = StepPlan("naive", depth, 0, width)
        plans[f"Sequoia, {nodes} nodes"] = StepPlan("naive", depth, 0, str(nodes))
    return plans


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--prompt-file", action="append", required=True, metavar="FILE")
    parser.add_argument("--prompt-tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs per prompt")
    parser.add_argument("--depth", type=int, default=4, metavar="N", help="guesses of a chain")
    parser.add_argument("--gpu-model", default="llama2-7b-128k", metavar="NAME")
    parser.add_argument("--gpu-draft", default="llama-68m", metavar="NAME")
    args = parser.parse_args()
    engine = load(args.model, dtype="bfloat16")
    texts = [Path(file).read_text(encoding="utf-8") for file in args.prompt_file]
    prompts = [engine.tokenizer.encode(text)[: args.prompt_tokens] for text in texts]
    target, draft = config_of(args.gpu_model), config_of(args.gpu_draft)
    work = Workload(target, draft, num_tokens=122_880, num_retrieved=4096)
    costs = functools.partial(work.seconds, GPU)
    plans, results = shapes(args.depth), list[dict[str, object]]()
    for temperature in (0.0, 0.6, 1.0):
        sampling = SamplingParams(temperature)
        for name, plan in plans.items():
            sessions = [
                run(engine, prompt, seed, sampling, plan, args.new_tokens)
                for prompt in prompts
                for seed in range(args.seeds if temperature else 1)
            ]
            found = evaluate(sessions, plan, costs)
            results.append({"temperature": temperature, "shape": name, **found})
            print(
                f"T={temperature:<4g} {name:18s} {found['tokens_per_step']:.2f} tokens a step; "
                f"{args.gpu_model} on a GPU at 122,880: {found['gpu_speedup']:.2f}x",
                flush=True,
            )
    print(json.dumps({**vars(args), "results": results}))


if __name__ == "__main__":
    main()
