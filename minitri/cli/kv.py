"""The flags --load-kv and --save-kv: K and V of a prompt from a file, and into one."""

import argparse
import logging
import os
from pathlib import Path

from minitri.cli.arguments import Flags
from minitri.engine import Engine
from minitri.errors import InputError, shorten

log = logging.getLogger("minitri")


def add_kv_flags(flags: Flags) -> None:
    """Both flags."""
    text = "start behind what the prompt has in common with the text whose KV cache FILE holds"
    flags.add_argument("--load-kv", metavar="FILE", help=text)
    text = "in the end write the KV cache to FILE (60 GB for 7B at 120,000 tokens, 0.19 GB for "
    text += "the default model at 8,000)"
    flags.add_argument("--save-kv", metavar="FILE", help=text)


def check_kv_flags(args: argparse.Namespace) -> None:
    """Raises `InputError`, before minutes of work, for files that cannot be read or written."""
    if args.load_kv is not None and not Path(args.load_kv).is_file():
        name = shorten(args.load_kv)
        raise InputError(f"there is no KV snapshot {name}; save one with --save-kv")
    if args.save_kv is not None and not os.access(Path(args.save_kv).absolute().parent, os.W_OK):
        name = shorten(args.save_kv)
        raise InputError(f"cannot write {name}: its folder is missing or read-only; name another")


def load_kv(args: argparse.Namespace, engine: Engine) -> None:
    """Does what --load-kv says."""
    if args.load_kv is not None:
        log.info("KV snapshot: %d tokens", engine.load_kv(args.load_kv))


def save_kv(args: argparse.Namespace, engine: Engine, num_cached: int) -> None:
    """Does what --save-kv says. `num_cached` tokens of the prompt were not read."""
    if args.load_kv is not None and not num_cached:
        what = "the prompt does not begin like the text of the KV snapshot %s, so it was of no use"
        log.warning(what, shorten(args.load_kv))
    if args.save_kv is not None:
        num_tokens = engine.save_kv(args.save_kv)
        size = Path(args.save_kv).stat().st_size / 1e6
        log.info("saved the KV cache of %d tokens, %.0f MB", num_tokens, size)
