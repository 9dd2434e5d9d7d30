"""The audit: is an OpenAI-compatible server's sampling lossless? `minitri audit http://...`

Exit codes: 0 lossless, 1 a fault, 2 bad input. Prints a table, or with --json one JSON object.
"""

import contextlib
import json
import os
from argparse import Namespace

from minitri.apps.audit.checks import FALSE_ALARM, audit
from minitri.apps.audit.client import connect
from minitri.apps.cli.arguments import OneLineParser, add_flags
from minitri.apps.cli.exits import program
from minitri.apps.cli.report import as_table

COLUMNS = "check verdict statistic p_value num_tokens"


def build_parser() -> OneLineParser:
    """The command-line parser of `minitri audit`."""
    parser = OneLineParser("audit")
    parser.usage = "minitri audit URL [flags]"
    add = parser.add_argument
    add("url", metavar="URL", help="of an OpenAI-compatible server")
    add("-m", "--model", help="which of its models (default: its first)")
    add("--api-key", help="what it asks for (default: MINITRI_API_KEY)")
    add_flags(parser, "num_tokens", "json")
    return parser


def run_command(args: Namespace) -> int:
    """Runs all checks; returns the exit code."""
    client = connect(args.url, args.api_key or os.environ.get("MINITRI_API_KEY"), args.model)
    with contextlib.closing(client.http):
        rows = [*audit(client, args.num_tokens)]
    is_lossless = all(row["verdict"] != "FAULT" for row in rows)
    if args.json:
        report = {
            "url": client.url,
            "endpoint": client.endpoint,
            "model": client.fields["model"],
            "lossless": is_lossless,
            "false_alarm": FALSE_ALARM,
            "checks": rows,
        }
        print(json.dumps(report))
    else:
        says = ["{verdict} {check}: {says}".format(**row) for row in rows if row["says"]]
        print(as_table(COLUMNS, rows), "", *says, sep="\n")
    return int(not is_lossless)


main = program(build_parser, run_command)
