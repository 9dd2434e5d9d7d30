"""Models on this disk: the programs `minitri pull`, `minitri list` and `minitri remove`.

They lie in the cache of the Hugging Face hub, which other programs share; what is there is scanned,
fetched, checked and deleted by its own library. The default model may also have come in a wheel.
Nothing else is listed or deleted.
"""

from minitri.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import contextlib
    import dataclasses
    import functools
    import os
    import signal
    import sys
    from pathlib import Path
    from typing import Any, NamedTuple

    from minitri.cli.arguments import OneLineParser
    from minitri.errors import InputError, explain, shorten
    from minitri.folders import weights_folder
    from minitri.loading.fetch import WHEEL, fetch, is_default, repository_of, unpacked_wheel
    from minitri.loading.hf_config import FAMILIES
    from minitri.loading.hf_folder import read_json, weight_files
    from minitri.loading.named_models import DEFAULT_MODEL, MODELS
    from minitri.log import log


class Held(NamedTuple):
    """A repository of the hub's cache, or the unpacked wheel, by the name that `--model` takes."""

    name: str
    repo: str
    num_bytes: int
    state: str
    path: Path
    delete: Any
    """A function, of the hub's library or the system."""


def held() -> list[Held]:
    """All of them, by name. Raises `InputError` if the hub's cache cannot be read."""
    from huggingface_hub import scan_cache_dir

    found = []
    names = {row.repo: name for name, row in MODELS.items()}
    if (file := unpacked_wheel()).is_file():
        size = file.stat().st_size
        found.append(Held(DEFAULT_MODEL, f"wheel {WHEEL}", size, "ready", file, file.unlink))
    folder = hubs_cache()
    if not folder.exists():
        return found
    with explain(f"the hub's cache {folder} cannot be read", "check HF_HOME"):
        cache = scan_cache_dir(folder)
        for damage in cache.warnings:
            log.warning("not listed: %s", shorten(damage))
        for repo in (it for it in cache.repos if it.repo_type == "model"):
            # By itself: its revisions may bear the hashes of another repository's.
            alone = dataclasses.replace(cache, repos=frozenset([repo]))
            deletion = alone.delete_revisions(*(it.commit_hash for it in repo.revisions))
            parts = sum(it.stat().st_size for it in repo.repo_path.glob("blobs/*.incomplete"))
            facts = (repo.repo_id, repo.size_on_disk + parts, _state(repo, parts), repo.repo_path)
            found.append(Held(names.get(repo.repo_id, repo.repo_id), *facts, deletion.execute))
    return sorted(found, key=lambda it: it.name.lower())


def _state(repo: Any, parts: int) -> str:
    """Ready if a revision has all its weights, whatever an earlier attempt left."""
    state = "interrupted; pull it again" if parts else "no weights"
    for revision in repo.revisions:
        with contextlib.suppress(InputError):  # no JSON, or not all of it
            kind = read_json(revision.snapshot_path / "config.json").get("model_type")
            if kind not in list(FAMILIES):
                return f"not for minitri ({shorten(kind, 20)})"
            weight_files(revision.snapshot_path)
            state = "ready"
    return state


def hubs_cache() -> Path:
    """The folder in which the hub's library keeps repositories."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def size_of(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def places() -> str:
    """Where weights lie, and how to move them."""
    return (
        f"Weights from the hub lie in {hubs_cache()}, wheels in {weights_folder()}. To move them, "
        "move the folder and set HF_HUB_CACHE (or HF_HOME, the folder above it), MINITRI_WEIGHTS."
    )


def pull(args: argparse.Namespace) -> None:
    """Fetches, completes or updates a model. Raises `InputError`."""
    repo = repository_of(args.model)
    if not is_default(repo):  # whose wheel is unpacked in a folder that must not stay
        signal.signal(signal.SIGINT, _stop)
    path = fetch(repo, progress=not args.quiet and sys.stderr.isatty())
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    print(f"{args.model}: {size_of(size)} in {path}")


def _stop(*_: object) -> None:
    """At once: Python would wait for the threads that download."""
    os.write(2, b"minitri: interrupted; pull it again, files that are whole stay\n")
    os._exit(130)


def show(_: argparse.Namespace) -> None:
    """Prints what is here. Raises `InputError`."""
    found = held()
    width = max([24, *(len(it.name) for it in found)])
    for it in found:
        print(f"{it.name:{width}s} {size_of(it.num_bytes):>10s}  {it.state:26s}  {it.repo}")
    print(f"{'together':{width}s} {size_of(sum(it.num_bytes for it in found)):>10s}\n{places()}")


def remove(args: argparse.Namespace) -> None:
    """Deletes a model, after a question at a terminal. Raises `InputError`."""
    found = [it for it in held() if args.model in (it.name, it.repo)]
    if not found:
        name = shorten(args.model, 60)
        raise InputError(f"no model {name!r} is on this disk; `minitri list` names those that are")
    for it in found:
        if it.path.is_symlink() or it.path.parent.is_symlink():
            raise InputError(f"{it.path} is linked to {it.path.resolve()}; delete it yourself")
    size = size_of(sum(it.num_bytes for it in found))
    if not args.yes and not sys.stdin.isatty():
        raise InputError(f"{args.model} ({size}) stays: there is no terminal to ask; use --yes")
    if not args.yes and input(f"Remove {args.model}, {size}? [y/N] ").lower() not in ("y", "yes"):
        print("It stays.")
        return
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would print tracebacks
    for it in found:
        with explain(f"{it.path} cannot be deleted", "check whose it is"):
            it.delete()
            if it.path.exists():
                raise PermissionError("it is still there")
    print(f"{args.model} is removed: {size}")


WORDS = {
    "pull": (pull, "Fetches a model, completes what was interrupted, updates what has changed."),
    "list": (show, "The models on this disk: in the hub's cache, and the default model's wheel."),
    "remove": (remove, "Deletes a model from the hub's cache, which other programs share."),
}


def build_parser(word: str) -> OneLineParser:
    """The flags of one of the programs."""
    examples = [""] if word == "list" else ["smollm2-360m", "Qwen/Qwen3-0.6B"]
    parser = OneLineParser(word, *examples, description=f"{WORDS[word][1]}\n{places()}")
    if word != "list":
        parser.add_argument("model", help="a name of --list-models, or a hub repository ORG/NAME")
    if word == "remove":
        parser.add_argument("-y", "--yes", action="store_true", help="without a question")
    return parser


PROGRAMS = {
    word: program(functools.partial(build_parser, word), run) for word, (run, _) in WORDS.items()
}
