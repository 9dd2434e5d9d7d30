"""The program `minitri score FILE`: mean log-probability and perplexity of a text."""

import json
import math
from argparse import Namespace

from minitri.apps.cli import arguments, boot, documents, exits, report, terminal


def run_command(args: Namespace) -> None:
    """Scores the file's text; --json also prints each log-probability. Raises `InputError`."""
    engine, [ids] = boot.load_engine(args, documents.read_document(args.file, "FILE"))
    run = engine.scoring(ids)
    terminal.print_stream(run, args, engine.config, show=False)
    [state] = run.rows
    if not state.finish_reason:
        raise KeyboardInterrupt
    scores = [logprob for logprob, _ in state.prompt_scores]
    mean = math.fsum(scores) / len(scores)
    perplexity = math.exp(-mean)
    if args.json:
        result = {
            "model": args.model,
            **report.where(engine.model),
            "num_tokens": len(ids),
            "logprob_per_token": mean,  # natural logarithms
            "perplexity": perplexity,
            "token_ids": ids,
            "logprobs": [None, *scores],
        }
        print(json.dumps(result))
    else:
        print(f"{len(ids)} tokens, {mean:.4f} nats per token, perplexity {perplexity:.4f}")


main = exits.program(lambda: arguments.OneLineParser("score"), run_command)
