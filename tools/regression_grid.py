"""Regression net: records tokens, texts and logits of many runs, and compares a later commit.

    python -m tools.regression_grid --record before.json
    python -m tools.regression_grid --check before.json --only triforce --skip-real

The grid is a list of runs ("cases") on one CPU thread: every method, policy, kind of drafter and
way to sample, streams with a cancelled request, prompts that begin with cached K and V,
log-probabilities, trees; most with tiny random models, some with SmolLM2-135M.
A record of a case holds token ids, texts, counts of accepted guesses, and a digest of the logits
of every pass but whole rounds of drafters, in order, which pins all levels bit for bit.

Where method or gammas are open and the text cannot depend on them (at temperature 0, or coupled),
the autotuner may follow the clock, so passes differ from run to run: only tokens and texts are
recorded then, the rest is null.

Bits are the same only on the same processor with the same PyTorch; `--check` warns where these
differ. The tool needs minitri's public API, and `core/runner.py`.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

import minitri
from minitri import Engine
from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program
from minitri.core import runner
from minitri.core.decoding.verification import Output
from minitri.core.errors import explain
from minitri.core.model.llama import Llama
from minitri.devices.cpu.kernels import load_kernels
from minitri.files.checkpoint import placements
from minitri.files.hf_config import read_config
from tools.paper.baselines.policies import speculation_with
from tools.paper.study import commit, machine

Settings = dict[str, Any]
"""Settings of a case: fields of minitri's settings, and model, draft, dtype, prompts, seed."""
Axis = dict[str, Settings]
"""Alternative settings, by the part that each adds to a case's name."""

ORIGINS = {"draft": "d", "retrieval": "r", "recovered": "x", "bonus": "b"}
COUNTS = ("name", "num_rounds", "num_draft_tokens", "num_tested_tokens", "num_accepted_tokens")
MACHINE = ("processor", "kernels", "capability", "torch", "python")
"""Parts of the header on which the last bits, or the prompts, may depend."""

TINY: Settings = {
    "model": "gqa",
    "draft": "near",
    "dtype": "float32",
    "prompts": "tokens-150",
    "seed": 7,
    "method": "triforce",
    "gamma1": 2,
    "gamma2": 4,
    "budget": 64,
    "num_recent_tokens": 24,
    "rebuild_stride": 16,
    "temperature": 0.8,
    "max_new_tokens": 32,
    "ignore_eos": True,
}
RAGGED: Settings = {**TINY, "prompts": "ragged"}
TREE: Settings = {**RAGGED, "gamma1": None, "gamma2": 3}
LONG: Settings = {**TINY, "model": "mha", "prompts": "long", "budget": None, "max_new_tokens": 64}
REAL: Settings = {
    "model": "smollm2-135m",
    "draft": "auto",
    "prompts": "topics",
    "seed": 7,
    "method": "triforce",
    "gamma1": 2,
    "gamma2": 6,
    "temperature": 0.8,
    "max_new_tokens": 32,
    "rebuild_stride": 16,
}
GREEDY: Axis = {"greedy": {"temperature": 0.0}}
SAMPLED: Axis = {"sampled": {}}
COUPLED: Axis = {"coupled": {"coupled": True}}
OPEN: Axis = {"open": {"gamma1": None, "gamma2": None}}
AUTO: Axis = {"auto": {"method": "auto", "gamma1": None, "gamma2": None}}
FILTERS: Axis = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "all": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
ENDS: Axis = {
    "eos": {"ignore_eos": False, "max_new_tokens": 64},
    "stop": {"stop": ("e", "th", "A", "7", ")", " "), "max_new_tokens": 64},
}


def over(name: str, *values: Any) -> Axis:
    """An axis of one setting."""
    return {f"{name}={value}": {name: value} for value in values}


def cross(group: str, fixed: Settings, *axes: Axis) -> dict[str, Settings]:
    """All combinations of the axes."""
    cases = {}
    for picks in itertools.product(*(axis.items() for axis in axes)):
        name = "/".join((group, *(part for part, _ in picks)))
        cases[name] = functools.reduce(operator.or_, (change for _, change in picks), fixed)
    return cases


def all_cases() -> dict[str, Settings]:
    """The grid, by the names of the cases."""
    samplers = GREEDY | SAMPLED | COUPLED
    methods = over("method", "autoregressive", "naive", "retrieval", "triforce")
    naive, retrieval, triforce = (over("method", m) for m in ("naive", "retrieval", "triforce"))
    drafted, cached = naive | triforce, retrieval | triforce
    f32, bf16, ngram = over("dtype", "float32"), over("dtype", "bfloat16"), over("draft", "ngram")
    dtypes, near = f32 | bf16, over("draft", "near")
    drafts = over("draft", "unrelated", "small-vocab", "trimmed", "ngram")
    policies = over("policy", "streaming", "topk", "h2o")
    return functools.reduce(
        operator.or_,
        (
            cross("core", TINY, over("model", "gqa", "mha"), dtypes, methods, samplers),
            cross("ragged", RAGGED, dtypes, methods, samplers),
            cross("policy", TINY, f32, policies, cached, GREEDY | SAMPLED),
            cross("policy", RAGGED, bf16, policies, cached, SAMPLED),
            cross("draft", TINY, drafts, f32, drafted, samplers),
            cross("draft", RAGGED, drafts, bf16, triforce, SAMPLED),
            cross("auto", TINY, near | ngram, dtypes, AUTO, samplers),
            cross("auto", RAGGED, near, dtypes, over("prompts", "ragged"), AUTO, SAMPLED),
            cross("auto", TINY, near | ngram, f32, naive | cached, OPEN, SAMPLED),
            cross("auto", TINY, near, f32, naive | cached, OPEN, GREEDY | COUPLED),
            cross("open-budget", LONG, near | ngram, dtypes, AUTO, SAMPLED),
            cross("default-budget", LONG, dtypes, triforce, SAMPLED),
            cross("gamma", TINY, naive, over("gamma1", 1, 5, 64), SAMPLED),
            cross("gamma", TINY, retrieval, over("gamma2", 1, 16, 64), SAMPLED),
            cross("gamma", RAGGED, triforce, over("gamma1", 1, 5), over("gamma2", 1, 16), SAMPLED),
            cross("cache", TINY, over("budget", 32, 96), over("chunk_size", 1, 4, 32), SAMPLED),
            cross("cache", TINY, over("rebuild_stride", 4, 999)),
            cross(
                "cache", RAGGED, over("budget", 16, 256) | over("num_sink_tokens", 0, 9), SAMPLED
            ),
            cross(
                "cache", RAGGED, over("observation_window", 1, 64) | over("num_recent_tokens", 1)
            ),
            cross("filter", TINY, FILTERS, drafted, SAMPLED | COUPLED),
            cross("end", RAGGED, ENDS, methods, samplers),
            cross("prompt", TINY, over("prompts", "tokens-1", "strings"), cached, SAMPLED),
            cross(
                "prompt", TINY, over("prefill_chunk", 1, 7, 64), over("policy", "retrieval", "h2o")
            ),
            cross("rope", TINY, over("rope_scaling", "linear:2", "llama3:4", "yarn:4"), SAMPLED),
            cross("seed", RAGGED, over("seed", 0, (3, 1, 4)), triforce, SAMPLED | COUPLED),
            cross("stream", RAGGED, over("run", "stream"), dtypes, methods, samplers),
            cross("reuse", RAGGED, over("run", "again", "snapshot"), dtypes, cached, samplers),
            cross("logprobs", RAGGED, over("logprobs", 0, 3), dtypes, methods, SAMPLED),
            cross("tree", TREE, over("tree", "4x2"), f32, naive | triforce, samplers),
            cross("real", REAL, f32, methods, GREEDY),
            cross("real", REAL, bf16, methods, SAMPLED),
            cross("real", REAL, f32, triforce, SAMPLED | COUPLED),
            cross("real", REAL, bf16, triforce, GREEDY | COUPLED),
            cross("real", REAL, dtypes, AUTO, GREEDY | SAMPLED),
            cross("real", REAL, bf16, AUTO, COUPLED),
            cross("real", REAL, ngram, bf16, drafted | AUTO, SAMPLED),
            cross(
                "real", REAL, bf16, over("policy", "h2o"), over("stop", ("\n\n", "the")), SAMPLED
            ),
        ),
    )


CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 50, 99, 150, 200, 240, 280, 300],
}
UNTIED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
WEIGHTS = "model.safetensors"


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE that can spell any text: 3 control tokens, 256 bytes, a few merges."""
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "the"), ("a", "n"), ("e", "r")]
    symbols = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {text: i for i, text in enumerate([*symbols, *map("".join, merges)])}
    pipeline = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(symbols[:3])
    pipeline.save(str(folder / "tokenizer.json"))


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of a small Llama under its Hugging Face name."""
    model = Llama(read_config(config, "tiny"), dtype=torch.float32, device=torch.device("meta"))
    generator = torch.Generator().manual_seed(seed)

    def scale(name: str) -> float:  # the first layer's MLP does most, so that one layer can draft
        if ".0." in name and not name.endswith(("v_proj.weight", "o_proj.weight")):
            return 0.22
        return 0.06 if "layers" in name else 0.4

    return {
        name: torch.randn(place.shape, generator=generator) * scale(name) + float("norm" in name)
        for name, place in placements(model).items()
    }


def write_model(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS)
    write_tokenizer(folder)


def write_tiny_models(folder: Path) -> None:
    """FOLDER/NAME/target and its drafters FOLDER/NAME/KIND for both tiny targets."""
    for seed, (name, changes) in enumerate({"gqa": {}, "mha": UNTIED}.items()):
        config = CONFIG | changes
        target, noise = random_weights(config, seed), random_weights(config, seed + 10)
        short = config | {"num_hidden_layers": 1}
        near = {k: target[k] + 0.02 * noise[k] for k in random_weights(short, 0)}
        write_model(folder / name / "target", config, target)
        write_model(folder / name / "near", short, near)
        write_model(folder / name / "unrelated", short, random_weights(short, seed + 20))
        small = {k: near[k][:280] if k in (EMBEDDING, HEAD) else near[k] for k in near}
        write_model(folder / name / "small-vocab", short | {"vocab_size": 280}, small)
        # One that reads tokens from the target's embedding table, and can say every other one.
        trimmed = {k: near[k] for k in near if k != EMBEDDING}
        trimmed[HEAD] = near.get(HEAD, near[EMBEDDING])[::2]
        trimmed["lm_head.token_ids"] = torch.arange(0, config["vocab_size"], 2)
        rows = torch.linspace(0, config["vocab_size"] - 1, 64).long()
        trimmed["target.embedding_sample"] = target[EMBEDDING][rows]
        of = {"draft_of": "target", "head_size": len(trimmed[HEAD]), "tie_word_embeddings": False}
        write_model(folder / name / "trimmed", short | of, trimmed)


def prompts_of(name: str) -> list[str] | list[list[int]]:
    """The prompts of a batch; token ids repeat themselves in part, so that n-grams match."""

    def ids(length: int) -> list[int]:
        draw = random.Random(length)
        phrases = [[draw.randrange(3, 265) for _ in range(6)] for _ in range(1 + length // 20)]
        return [token for _ in range(length) for token in draw.choice(phrases)][:length]

    texts = {
        "topics": ["\n\n".join(topics[key] for key in sorted(topics))[:2400]],
        "strings": ["The harbour wind blew, the gulls cried.", "Naïve café: größer 日本語 🙂🚀"],
    }
    batches = {"ragged": [5, 150, 61], "long": [1200, 1100, 1300]}
    lengths = batches.get(name) or [int(name.rpartition("-")[2])] if name not in texts else []
    return texts.get(name) or [ids(length) for length in lengths]


@contextlib.contextmanager
def logits_of_passes() -> Iterator[list[str]]:
    """A list that takes shape and digest of the logits of every pass that returns any."""
    calls: list[str] = []

    def noted(probs_BNV: Tensor, logits_BNV: Tensor, *others: Any) -> Output:
        digest = hashlib.sha256(logits_BNV.contiguous().numpy().tobytes()).hexdigest()[:16]
        calls.append(f"{'x'.join(map(str, logits_BNV.shape))} {digest}")
        return Output(probs_BNV, logits_BNV, *others)

    with mock.patch.object(runner, "Output", noted):
        yield calls


@functools.lru_cache(maxsize=1)
def engine_for(
    folder: Path, model: str, draft: str, dtype: str, rope_scaling: str | None
) -> Engine:
    is_tiny = (folder / model).exists()
    return minitri.load(
        str(folder / model / "target") if is_tiny else model,
        draft=str(folder / model / draft) if is_tiny and draft != "ngram" else draft,
        dtype=dtype,
        device="cpu",
        rope_scaling=rope_scaling,
    )


def follows_clock(settings: Settings) -> bool:
    """Whether the engine may choose by the clock: see `SpeculationConfig.timed`."""
    uses = {"naive": ("gamma1",), "retrieval": ("gamma2",), "triforce": ("gamma1", "gamma2")}
    is_open = settings["method"] == "auto" or any(
        settings[gamma] is None for gamma in uses.get(settings["method"], ())
    )
    one_text = settings["temperature"] == 0 or settings.get("coupled", False)
    return is_open and one_text


def settings_for(kind: Any, rest: Settings) -> Any:
    """Makes one of minitri's settings classes; takes the fields that it has out of `rest`."""
    names = {field.name for field in dataclasses.fields(kind)} & set(rest)
    values = {name: rest.pop(name) for name in names}
    if values.get("policy", "retrieval") == "retrieval":
        return kind(**values)
    return speculation_with(values.pop("policy"), kind(**values))


def run_case(folder: Path, settings: Settings) -> dict[str, Any]:
    """Runs a case; returns the record that a later commit has to reproduce."""
    rest = dict(settings)
    place = {key: rest.pop(key, None) for key in ("model", "draft", "dtype", "rope_scaling")}
    prompts, seed = prompts_of(rest.pop("prompts")), rest.pop("seed")
    run = RUNS[rest.pop("run", "batch")]
    wishes = {
        "sampling": settings_for(minitri.SamplingParams, rest),
        "generation": settings_for(minitri.GenerationConfig, rest),
        "speculation": settings_for(minitri.SpeculationConfig, rest),
    }
    if rest:
        raise minitri.InputError(f"minitri has no setting {', '.join(rest)}; adapt the grid to it")
    engine = engine_for(folder, **place)
    with logits_of_passes() as calls:
        events = run(engine, prompts, seed, wishes)
    if not calls:
        raise RuntimeError("no pass made an Output of core/runner.py; nothing would be pinned")
    return record_of(settings, events, calls)


def run_batch(engine: Engine, prompts: list[Any], seed: Any, wishes: Settings) -> list[Any]:
    """All prompts at once."""
    return list(engine.generate(prompts, seed=seed, **wishes))


def run_stream(engine: Engine, prompts: list[Any], seed: int, wishes: Settings) -> list[Any]:
    """Twice the prompts through two rows; one request is cancelled after its fifth token."""
    speculation = wishes.pop("speculation")
    requests = [minitri.Request(prompt, seed + i, **wishes) for i, prompt in enumerate(prompts * 2)]
    events: list[Any] = []
    with engine.stream(requests, batch_size=2, speculation=speculation) as stream:
        for event in stream:
            events.append(event)
            if sum(isinstance(e, minitri.Token) and e.row == 1 for e in events) == 5:
                stream.cancel(1)
    return events


def run_again(engine: Engine, prompts: list[Any], seed: int, wishes: Settings) -> list[Any]:
    """A text, and another one that begins with it, so that K and V are used again."""
    engine.release()
    events = list(engine.generate(prompts[-1], seed=seed, **wishes))
    end = next(event for event in events if isinstance(event, minitri.End))
    longer = [*prompts[-1], *end.token_ids, *prompts[-1][:9]]
    return list(engine.generate(longer, seed=seed, **wishes))


def run_snapshot(engine: Engine, prompts: list[Any], seed: int, wishes: Settings) -> list[Any]:
    """A text after K and V that were saved to a file and loaded."""
    engine.release()
    list(engine.generate(prompts[-1], seed=seed, **wishes))
    with tempfile.TemporaryDirectory() as folder:
        engine.save_kv(Path(folder) / "held.kv")
        engine.release()
        engine.load_kv(Path(folder) / "held.kv")
        longer = [*prompts[-1], *prompts[-1][:9]]
        events = list(engine.generate(longer, seed=seed, **wishes))
        engine.release()
    return events


RUNS = {"batch": run_batch, "stream": run_stream, "again": run_again, "snapshot": run_snapshot}


def record_of(settings: Settings, events: list[Any], calls: list[str]) -> dict[str, Any]:
    ends = sorted((e for e in events if isinstance(e, minitri.End)), key=lambda end: end.row)
    rows = [[e for e in events if isinstance(e, minitri.Token) and e.row == b.row] for b in ends]
    pieces = [json.dumps([token.text for token in row]) for row in rows]
    scores = [[(t.logprob, t.top_logprobs) for t in row if t.logprob is not None] for row in rows]
    stats: Any = ends[0].stats
    fixed = not follows_clock(settings)
    levels = [{name: getattr(level, name) for name in COUNTS} for level in stats.stages]
    return {
        "settings": settings,
        "tokens": [list(end.token_ids) for end in ends],
        "finish": [end.finish_reason for end in ends],
        "texts": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in pieces],
        "scores": hashlib.sha256(json.dumps(scores).encode()).hexdigest()[:16],
        "cached": [end.row_stats.num_cached_tokens for end in ends],
        "origins": ["".join(ORIGINS[t.origin] for t in row) for row in rows] if fixed else None,
        "levels": levels if fixed else None,
        "num_rebuilds": stats.num_rebuilds if fixed else None,
        "steps_per_plan": dict(stats.steps_per_plan) if fixed else None,
        "digest": calls if fixed else None,
    }


def header() -> dict[str, Any]:
    """Revision, processor and versions of a record."""
    kernels = load_kernels()
    return {
        "minitri": str(Path(minitri.__file__).resolve().parent),
        "revision": commit(),
        "processor": machine(),
        "kernels": kernels and kernels.instructions,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_grid(cases: Mapping[str, Settings]) -> dict[str, Any]:
    """Runs all cases; returns the content of a record."""
    torch.set_num_threads(1)
    top = header()
    print(f"regression_grid: {top['minitri']}, revision {top['revision']}", file=sys.stderr)
    results, started = {}, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="regression_grid_") as temporary:
        write_tiny_models(Path(temporary))
        for name in (bar := tqdm(cases, unit=" cases", dynamic_ncols=True)):
            bar.set_postfix_str(name)
            results[name] = run_case(Path(temporary), cases[name])
        engine_for.cache_clear()
    seconds = round(time.perf_counter() - started, 1)
    found = {"header": {**top, "seconds": seconds}, "cases": results}
    return json.loads(json.dumps(found))  # as it reads from a file


def first_difference(before: Any, now: Any, path: str) -> str | None:
    """The first place where two values differ, and both; None where they are the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(f"{path}.{key}", before.get(key), now.get(key)) for key in before | now]
    elif isinstance(before, list) and isinstance(now, list):
        both = enumerate(itertools.zip_longest(before, now))
        pairs = [(f"{path}[{i}]", b, n) for i, (b, n) in both]
    else:
        return None if before == now else f"{path}: {str(before)[:70]} -> {str(now)[:70]}"
    return next((line for p, b, n in pairs if (line := first_difference(b, n, p))), None)


def check(before: dict[str, Any], cases: dict[str, Settings]) -> int:
    """Runs the cases that were recorded, prints what differs; returns the exit code."""
    top, old = before["header"], before["cases"]
    now = run_grid({name: cases[name] for name in cases if name in old})
    if unlike := [key for key in MACHINE if top.get(key) != now["header"][key]]:
        print(f"warning: recorded with another {', '.join(unlike)}, so last bits may differ")
    num_cases = 0
    for name, was in old.items():
        found = now["cases"].get(name, {})
        lines = [first_difference(was.get(key), found.get(key), key) for key in was | found]
        lines = lines if found else ["no longer in the grid"]
        num_cases += any(lines)
        for line in filter(None, lines):
            print(f"{name}: {line}")
    print(f"{num_cases} of {len(old)} cases differ from revision {top['revision']}")
    if new := len(set(cases) - set(old)):
        print(f"{new} cases are new and were not compared")
    return int(num_cases > 0)


def read_record(file: Path) -> dict[str, Any]:
    with explain(f"{file} is no record of a grid", "make one with --record"):
        record = json.loads(file.read_text())
        return {key: record[key] for key in ("header", "cases")}


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.regression_grid", description=__doc__)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--record", type=Path, metavar="FILE", help="run the grid, write FILE (JSON)")
    text = "run the grid, print what differs from FILE; exit code 1 if anything does"
    add("--check", type=Path, metavar="FILE", help=text)
    text = "only cases with it in their name"
    parser.add_argument("--only", default="", metavar="SUBSTRING", help=text)
    parser.add_argument("--skip-real", action="store_true", help="leave SmolLM2-135M out")
    return parser


def wanted(cases: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Cases that the flags name. Raises `InputError` if there are none."""
    skipped = "real/" if args.skip_real else "\0"
    found = {k: v for k, v in cases.items() if args.only in k and not k.startswith(skipped)}
    if not found:
        raise minitri.InputError(f"no case has {args.only!r} in its name; a record has all names")
    return found


def run_command(args: argparse.Namespace) -> int:
    """Records or checks the grid; returns the exit code."""
    cases = wanted(all_cases(), args)
    if args.record:
        args.record.touch()  # before minutes of work
        args.record.write_text(json.dumps(run_grid(cases), indent=1) + "\n")
        return 0
    before = read_record(args.check)
    return check({**before, "cases": wanted(before["cases"], args)}, cases)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
