"""Does speculation change anything on *your* weights? `python -m minitri.selftest --model NAME`

Decodes one prompt autoregressively and with each speculative method, greedily and with seed-coupled
sampling, and compares token by token. A difference is called a numeric tie if rounding explains it
(`departures.py`), and a BUG otherwise. A bug that only swaps tokens within the bound of
rounding would pass for it; the bound is printed, and with --dtype float32 it leaves no such room.

Then the default mode, independent random numbers at a temperature above 0, with your filters: many
short texts per method, of which statistical tests tell whether they follow the model's distribution
(`distribution_test.py`); their odds of a false alarm, and what they would find, are
printed.

Exit codes: 0 all is well, 1 a bug, 2 bad input, 130 interrupted. The last line of standard output
is JSON.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import dataclasses
    import functools
    import json
    import logging
    import sys
    from typing import Any

    import torch

    from minitri.bench.compare import num_same
    from minitri.cli import arguments
    from minitri.cli.boot import load_engine
    from minitri.cli.inputs import read_prompt
    from minitri.cli.report import where
    from minitri.cli.terminal import finish
    from minitri.engine import Engine
    from minitri.errors import shorten
    from minitri.loader import load
    from minitri.loading.prompt_ids import MAX_SEED
    from minitri.selftest.departures import Mode, explain, modes
    from minitri.selftest.distribution_test import FALSE_ALARM, POWER, run_test, windows
    from minitri.settings import METHODS, GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

WINDOW = 64
NEW_TOKENS = 64
SMALL_BUDGET = 32
"""Of the statistical test: tokens that a text begins with, tokens that it goes on for, and the
budget of its retrieval cache, small enough that the guesses of that level are often wrong."""


def build_parser() -> arguments.OneLineParser:
    """The flags of the self-test."""
    parser = arguments.OneLineParser(
        "selftest",
        "--model smollm2-135m --dtype float32",
        "--temperature 0.6 --top-p 0.9 --num-samples 20000",
        "--model llama2-7b-128k --method triforce --max-prompt-tokens 32000",
        description="Compares every speculative method with autoregressive decoding, token by "
        "token, on your weights, and its samples with the model's distribution.",
    )
    arguments.add_model_flags(parser)
    arguments.add_prompt_flags(parser, max_prompt_tokens=2000)
    add = parser.add_argument
    choices = ("auto", *METHODS[2:])
    text = "may be given several times (default: naive, retrieval, triforce)"
    add("--method", action="append", choices=choices, dest="methods", help=text)
    text = "of the sampled runs, coupled or not"
    add("--temperature", type=float, metavar="T", default=0.8, help=text)
    add("--seed", type=arguments.whole(0, MAX_SEED), metavar="N", default=7, help=text)
    arguments.add_fields(parser, SamplingParams, "top_k", "top_p", "min_p")
    text = "tokens per method in the statistical test of uncoupled sampling; 0 leaves it out"
    add("--num-samples", type=arguments.whole(0, 10**6), metavar="N", default=2048, help=text)
    arguments.add_draft_flag(parser)
    arguments.add_gpu_flags(parser)
    arguments.add_size_flags(parser.add_argument_group("speculation"))
    arguments.add_switches(parser, quiet="no progress or log on standard error")
    parser.set_defaults(max_new_tokens=128, ignore_eos=True)
    return parser


class SelfTest:
    """Runs the comparisons of one engine on one prompt."""

    def __init__(self, engine: Engine, prompt: list[int], args: argparse.Namespace) -> None:
        self.engine = engine
        self.prompt = prompt
        self._args = args

    def compare(
        self, mode: Mode, speculation: SpeculationConfig, expected: list[int]
    ) -> dict[str, Any]:
        """One line on standard output, and the same as an object."""
        got = self.decode(mode, speculation)
        method = speculation.method
        model = self.engine.model
        n = num_same(expected, got, len(got))
        total = len(got)
        title = f"{mode.name:8s} {method:10s}"
        result = {"mode": mode.name, "method": method, "num_tokens": total, "num_equal_tokens": n}
        if n == total:
            print(f"{title} equal: {n} of {total} tokens", flush=True)
            return {**result, "verdict": "equal"}
        self.engine.release()  # room for the model in float32
        found = explain(
            model,
            self.exact_engine.model,
            self.prompt + got[:n],
            mode,
            expected=expected[n],
            got=got[n],
            seed=self._args.seed,
            block=speculation.max_block,
        )
        # Are the bits always the same?
        is_bitwise = model.execution.is_row_invariant and not speculation.tree
        is_tie = found.is_tie and not is_bitwise
        verdict = "numeric tie" if is_tie else "BUG"
        print(
            f"{title} {verdict}: {n} of {total} tokens equal, then at position {found.position} "
            f"{self.spell(found.got)} instead of {self.spell(found.expected)}; top-2 logit gap "
            f"{found.top2_gap:.3g} in {where(model)['dtype']}; in float32 the worse of the two "
            f"scores {found.score_gap:.3g} below the best, rounding explains {found.bound:.3g}",
            flush=True,
        )
        return {**result, "verdict": verdict, **dataclasses.asdict(found)}

    def check_samples(
        self, speculation: SpeculationConfig, sampling: SamplingParams, num_methods: int
    ) -> dict[str, Any]:
        """The statistical test of one method: a line on standard output, and an object.

        An alarm in another dtype than float32 may be rounding, so it is looked at in float32.
        """
        method = speculation.method
        chunk = speculation.chunk_size
        context = self.engine.config
        num_new = min(NEW_TOKENS, context.context_length // 2)
        num_rows = -(-self._args.num_samples // num_new)
        budget = speculation.budget or -(-SMALL_BUDGET // chunk) * chunk
        prompts = windows(self.prompt, num_rows, min(WINDOW, context.context_length // 2))
        speculation = dataclasses.replace(speculation, budget=budget)
        settings = {"num_new": num_new, "seed": self._args.seed, "num_tests": num_methods}
        log.info("sampled, %s: %d texts of %d tokens ...", method, num_rows, num_new)
        test = run_test(self.engine, prompts, sampling, speculation, **settings)
        note = ""
        if test.is_alarm and self.engine.model.dtype != torch.float32:
            self.engine.release()
            note = f" in float32; before, {test.p_values[test.worst]:.2g} ({test.worst})"
            test = run_test(self.exact_engine, prompts, sampling, speculation, **settings)
        worst = test.worst
        verdict = "BUG" if test.is_alarm else "consistent"
        kind = "drafter" if "drafter of bonus tokens" in test.sums else "order"
        shift = max(test.smallest_shift(name) for name in test.sums if name.startswith(kind))
        print(
            f"sampled  {method:10s} {verdict}: {num_rows * num_new} tokens, least p-value "
            f"{test.p_values[worst]:.2g} ({worst}), of {len(test.p_values)}{note}; a bug below "
            f"{test.alarm_level:.1g}; {POWER:.0%} of shifts of `{kind}` by {shift:.1%} are found",
            flush=True,
        )
        return {
            "mode": "sampled",
            "method": method,
            "verdict": verdict,
            "num_tokens": num_rows * num_new,
            "p_values": test.p_values,
        }

    def decode(self, mode: Mode, speculation: SpeculationConfig) -> list[int]:
        """The tokens of one run, which goes on after the end of a text: all are equally long."""
        generation = arguments.taken(GenerationConfig, self._args)
        what = mode.name, speculation.method, generation.max_new_tokens, len(self.prompt)
        log.info("%s, %s: %d tokens after %d ...", *what)
        run = self.engine.generate(
            self.prompt,
            sampling=mode.sampling,
            generation=generation,
            speculation=speculation,
            seed=self._args.seed,
        )
        end = finish(run, quiet=self._args.quiet)
        stats = end.stats
        ms = stats.ms_per_token or 0.0
        log.info("  prefill %.1f s, %.1f ms/token", stats.prefill_seconds, ms)
        return list(end.token_ids)

    @functools.cached_property
    def exact_engine(self) -> Engine:
        """The models in float32: those that are tested, or else loaded when first needed."""
        model = self.engine.model
        if model.dtype == torch.float32:
            return self.engine
        log.info("a difference: loading the model in float32 to look at it ...")
        flags = arguments.model_of(self._args) | {"dtype": "float32", "attention": "auto"}
        flags |= {"device": str(model.device), "progress": False}
        return load(**flags, draft=arguments.draft_of(self._args))

    def spell(self, token: int) -> str:
        """A token as text and id."""
        return f"{shorten(repr(self.engine.tokenizer.decode([token])), 30)} (id {token})"


def run_command(args: argparse.Namespace) -> int:
    """Does what the flags say; returns the exit code."""
    methods = list(dict.fromkeys(args.methods or METHODS[2:]))
    args.method = "retrieval" if methods == ["retrieval"] else "triforce"  # which has a drafter
    speculation = arguments.speculation_of(args)
    draft = arguments.draft_of(args)
    sampling = arguments.taken(SamplingParams, args)
    both = modes(args.temperature)
    arguments.taken(GenerationConfig, args)  # bad values fail before anything is loaded
    kept = [(read_prompt(args.prompt_file, args.prompt), args.max_prompt_tokens)]
    engine, [prompt] = load_engine(args, draft, kept, num_new=args.max_new_tokens)
    test = SelfTest(engine, prompt, args)
    results = []
    for mode in both:
        alone, *others = (
            dataclasses.replace(speculation, method=method, coupled=mode.coupled)
            for method in ("autoregressive", *methods)
        )
        expected = test.decode(mode, alone)
        results += [test.compare(mode, other, expected) for other in others]
    if args.num_samples and sampling.temperature:
        for method in methods:
            config = dataclasses.replace(speculation, method=method)
            results.append(test.check_samples(config, sampling, len(methods)))
        print(f"a false alarm in the samples has odds of 1 in {1 / FALSE_ALARM:,.0f}")
    verdicts = [result["verdict"] for result in results]
    bugs = verdicts.count("BUG")
    counts = {name: verdicts.count(name) for name in ("equal", "numeric tie", "consistent")}
    equal, ties, consistent = counts.values()
    advice = "; please report the lines that say BUG" if bugs else ""
    print(
        f"{len(results)} comparisons: {equal} equal, {ties} numeric ties, {consistent} consistent, "
        f"{bugs} bugs{advice}"
    )
    report = {
        "model": args.model,
        "draft": draft,
        **where(engine.model),
        "num_prompt_tokens": len(test.prompt),
        "num_new_tokens": args.max_new_tokens,
        "sampling": dataclasses.asdict(sampling),
        "seed": args.seed,
        "num_equal": equal,
        "num_ties": ties,
        "num_consistent": consistent,
        "num_bugs": bugs,
        "comparisons": results,
    }
    print(json.dumps(report), flush=True)
    return 1 if bugs else 0


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m minitri.selftest`."""
    with program(build_parser, argv, parallel=True) as args:
        sys.exit(run_command(args))


if __name__ == "__main__":
    main()
