"""Models on this disk: the programs `minitri pull`, `minitri list` and `minitri remove`.

They lie in the cache of the Hugging Face hub, which other programs share, a folder each; its own
library fetches and checks them. The default model may also have come in a wheel.
"""

from minitri.apps.cli.exits import clean_imports, program

with clean_imports():
    import argparse
    import contextlib
    import functools
    import shutil
    import sys
    from collections.abc import Callable
    from pathlib import Path
    from typing import NamedTuple

    from minitri.apps.cli.arguments import OneLineParser
    from minitri.core.errors import InputError, explain, shorten
    from minitri.devices.folders import weights_folder
    from minitri.files.fetch import WHEEL, fetch, hub_cache, repository_of, wheel_of
    from minitri.files.hf_config import FAMILIES
    from minitri.files.hf_folder import read_json, weight_files
    from minitri.files.named_models import DEFAULT_MODEL, MODELS


class Held(NamedTuple):
    """A repository of the hub's cache, or the unpacked wheel, by the name that `--model` takes."""

    name: str
    repo: str
    path: Path
    num_bytes: int
    is_ready: bool


def held() -> list[Held]:
    """All of them, by name."""
    found = []
    wheel = wheel_of(repository_of(DEFAULT_MODEL))
    if wheel and wheel.is_file():
        found.append(Held(DEFAULT_MODEL, f"wheel {WHEEL}", wheel, wheel.stat().st_size, True))
    names = {row.repo: name for name, row in MODELS.items()}
    for path in hub_cache().glob("models--*"):
        repo = path.name.removeprefix("models--").replace("--", "/")
        size = sum(it.stat().st_size for it in path.glob("blobs/*"))
        is_ready = any(map(runs, path.glob("snapshots/*")))
        found.append(Held(names.get(repo, repo), repo, path, size, is_ready))
    return sorted(found, key=lambda it: it.name.lower())


def runs(folder: Path) -> bool:
    """Whether it holds a whole model of a kind that minitri runs."""
    with contextlib.suppress(InputError):
        weight_files(folder)
        return read_json(folder / "config.json").get("model_type") in list(FAMILIES)
    return False


def size_of(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def places() -> str:
    """Where weights lie, and how to move them."""
    return (
        f"Weights from the hub lie in {hub_cache()}, wheels in {weights_folder()}. To move them, "
        "move the folder and set HF_HUB_CACHE (or HF_HOME, the folder above it), MINITRI_WEIGHTS."
    )


def pull(args: argparse.Namespace) -> None:
    """Fetches a model, completes what was interrupted, updates what has changed."""
    repo = repository_of(args.model)
    # Ctrl-C ends a download at once, not when its threads have; only pip has a folder to clean up.
    with contextlib.nullcontext() if wheel_of(repo) else clean_imports():
        path = fetch(repo, progress=not args.quiet and sys.stderr.isatty())
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    print(f"{args.model}: {size_of(size)} in {path}")


def show(_: argparse.Namespace) -> None:
    """The models on this disk: in the hub's cache, and the default model's wheel."""
    found = held()
    width = max([24, *(len(it.name) for it in found)])
    for it in found:
        state = "ready" if it.is_ready else "not whole, or not for minitri"
        print(f"{it.name:{width}s} {size_of(it.num_bytes):>10s}  {state:30s}  {it.repo}")
    print(f"{'together':{width}s} {size_of(sum(it.num_bytes for it in found)):>10s}\n{places()}")


def remove(args: argparse.Namespace) -> None:
    """Deletes a model from the hub's cache, which other programs share."""
    found = [it for it in held() if args.model in (it.name, it.repo)]
    if not found:
        name = shorten(args.model, 60)
        raise InputError(f"no model {name!r} is on this disk; `minitri list` names those that are")
    for it in found:
        with explain(f"{it.path} cannot be deleted", "check whose it is"):
            if it.path.is_symlink() or it.path.is_file():
                it.path.unlink()
            else:
                shutil.rmtree(it.path)
    print(f"{args.model} is removed: {size_of(sum(it.num_bytes for it in found))}")


def build_parser(run: Callable[[argparse.Namespace], None], word: str) -> OneLineParser:
    """The flags of one of the programs."""
    examples = [""] if word == "list" else ["smollm2-360m", "Qwen/Qwen3-0.6B"]
    parser = OneLineParser(word, *examples, description=f"{run.__doc__}\n{places()}")
    if word != "list":
        place = "ORG/NAME" + "[@REVISION]" * (word == "pull")
        parser.add_argument("model", help=f"a name of --list-models, or a hub repository {place}")
    return parser


PROGRAMS = {
    word: program(functools.partial(build_parser, run, word), run)
    for word, run in {"pull": pull, "list": show, "remove": remove}.items()
}
