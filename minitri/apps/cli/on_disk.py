"""Models on this disk: the programs `minitri pull`, `minitri list` and `minitri remove`.

Each is a folder in the cache of the Hugging Face hub, which other programs share; its own library
downloads and checks them. The default model may also have come in a wheel.
"""

import argparse
import contextlib
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program, stop_at_once
from minitri.core.errors import InputError, explain, shorten
from minitri.devices.folders import weights_folder
from minitri.files.fetch import WHEEL, fetch, hub_cache, repository_of, wheel_of
from minitri.files.hf_config import FAMILIES
from minitri.files.hf_folder import read_json, weight_files
from minitri.files.named_models import DEFAULT_MODEL, MODELS


class StoredModel(NamedTuple):
    """A repository in the hub's cache, or the unpacked wheel, by the name that `--model` takes."""

    name: str
    repo: str
    path: Path
    num_bytes: int
    is_ready: bool


def stored_models() -> list[StoredModel]:
    """All models on this disk, by name."""
    models = []
    wheel = wheel_of(repository_of(DEFAULT_MODEL))
    if wheel and wheel.is_file():
        size = wheel.stat().st_size
        models.append(StoredModel(DEFAULT_MODEL, f"wheel {WHEEL}", wheel, size, True))
    names = {row.repo: name for name, row in MODELS.items()}
    for path in hub_cache().glob("models--*"):
        repo = path.name.removeprefix("models--").replace("--", "/")
        size = sum(file.stat().st_size for file in path.glob("blobs/*"))
        is_ready = any(map(is_runnable, path.glob("snapshots/*")))
        models.append(StoredModel(names.get(repo, repo), repo, path, size, is_ready))
    return sorted(models, key=lambda model: model.name.lower())


def is_runnable(folder: Path) -> bool:
    """Whether a folder holds a whole model of a family that minitri runs."""
    with contextlib.suppress(InputError):
        weight_files(folder)
        return read_json(folder / "config.json").get("model_type") in list(FAMILIES)
    return False


def in_words(num_bytes: int) -> str:
    """A number of bytes in MB or GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def places() -> str:
    """Where weights are kept, and how to move them, in a sentence."""
    return (
        f"Weights from the hub are in {hub_cache()}, wheels in {weights_folder()}. To move them, "
        "move the folder and set HF_HUB_CACHE (or HF_HOME, the folder above it), MINITRI_WEIGHTS."
    )


def pull_model(args: argparse.Namespace) -> None:
    """Downloads a model, or what is missing of it, or its update."""
    repo = repository_of(args.model)
    # Ctrl-C ends a download at once, not when its threads have; only pip has a folder to clean up.
    with contextlib.nullcontext() if wheel_of(repo) else stop_at_once():
        path = fetch(repo, progress=not args.quiet and sys.stderr.isatty())
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    print(f"{args.model}: {in_words(size)} in {path}")


def show_models(_: argparse.Namespace) -> None:
    """Lists the models on this disk: in the hub's cache, and the default model's wheel."""
    models = stored_models()
    width = max([24, *(len(model.name) for model in models)])
    for model in models:
        state = "ready" if model.is_ready else "not whole, or not for minitri"
        size = in_words(model.num_bytes)
        print(f"{model.name:{width}s} {size:>10s}  {state:30s}  {model.repo}")
    total = in_words(sum(model.num_bytes for model in models))
    print(f"{'together':{width}s} {total:>10s}\n{places()}")


def remove_model(args: argparse.Namespace) -> None:
    """Deletes a model from the hub's cache, which other programs share."""
    models = [model for model in stored_models() if args.model in (model.name, model.repo)]
    if not models:
        name = shorten(args.model, 60)
        raise InputError(f"no model {name!r} is on this disk; `minitri list` names those that are")
    for model in models:
        with explain(f"{model.path} cannot be deleted", "check whose it is"):
            if model.path.is_symlink() or model.path.is_file():
                model.path.unlink()
            else:
                shutil.rmtree(model.path)
    print(f"{args.model} is removed: {in_words(sum(model.num_bytes for model in models))}")


def build_parser(run: Callable[[argparse.Namespace], None], name: str) -> OneLineParser:
    """The flags of one of the programs."""
    examples = [""] if name == "list" else ["smollm2-360m", "Qwen/Qwen3-0.6B"]
    parser = OneLineParser(name, *examples, description=f"{run.__doc__}\n{places()}")
    if name != "list":
        place = "ORG/NAME" + "[@REVISION]" * (name == "pull")
        parser.add_argument("model", help=f"a name of --list-models, or a hub repository {place}")
    return parser


pull, show, remove = (
    program(functools.partial(build_parser, run, name), run)
    for name, run in {"pull": pull_model, "list": show_models, "remove": remove_model}.items()
)
