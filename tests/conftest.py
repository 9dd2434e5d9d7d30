"""Tiny seeded models and engines for the CPU, and the real weights where they can be had."""

import contextlib
import functools
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run in parallel processes

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

import minitri
from minitri import Engine, Generation, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.errors import InputError
from minitri.core.requests import End
from minitri.devices.cpu.pytorch import attend_cpu
from minitri.files.fetch import locate
from minitri.text.tokenizer import Tokenizer
from minitri.trees.tree_level import TreeLevel
from tests.core import rigs
from tests.core.rigs import GREEDY, near_copy, tiny_config

if not torch.cuda.is_available():
    # Before anything imports Triton, whose kernels then run on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
rigs.Rig.level_type = TreeLevel  # which `tests/core` does not import

SENTENCES = [
    "She had been forced into prudence in her youth, she learned romance as she grew older.",
    "The harbour wind blew, the gulls cried: 1814 was a very good year -- or so they said!",
    "Naïve café résumé, größer, 日本語テキスト, emoji 🙂🚀 and “quotes”.",
    "    indented code:\n\tfor i in range(10):\n\t\tprint(i)\n",
]
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
SHAPE |= {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A small byte-level BPE that can spell any text, with <s> and </s> as tokens 1 and 2."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(SENTENCES, trainer)
    return pipeline


def write_hf_folder(folder: Path, *, seed: int = 0, model_type: str = "llama", **changes) -> Path:
    """A random model with a tokenizer, written by `transformers` itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        # Distributions are far from uniform.
        std = 0.2 if "norm" in name or "bias" in name else 0.15
        mean = float("norm" in name and "gemma" not in model_type)  # Gemma adds 1
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    model.save_pretrained(folder)
    edit_json(folder / "generation_config.json", do_sample=False)  # greedy where nothing is said
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def edit_json(file: Path, **changes) -> None:
    """Changes keys of a JSON file; None removes one."""
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


tiny_model = functools.partial(rigs.tiny_model, attend=attend_cpu)
load = functools.partial(minitri.load, dtype="float32", device="cpu")


def fill(cache, other):
    """Into an empty cache all that another one holds."""
    for b, length in enumerate(other.lengths):
        for layer, pair in enumerate(other.layers(b)):
            cache.write(layer, b, *(slots_KSD[:, :length] for slots_KSD in pair))
        cache.restore(b, length)


def resident_bytes(process: int | str = "self") -> int:
    """Memory that a process has really taken, on Linux."""
    return 4096 * int(Path(f"/proc/{process}/statm").read_text().split()[1])


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The last line of standard output."""
        return json.loads(self.out.splitlines()[-1])

    @property
    def lines(self) -> dict[int, dict]:
        """The answers to --prompts, by their lines."""
        found = [json.loads(line) for line in self.out.splitlines()]
        return {answer["line"]: answer for answer in found}


@pytest.fixture
def call(capsys):

    def call(program, *words: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            program([*map(str, words)])
        return Done(ended.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def interrupt(monkeypatch):
    """Sends Ctrl-C before the event of this number."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(number: int, times: int = 1) -> None:
        real, events = Generation.__next__, itertools.count(1)

        def following(run):
            if next(events) == number:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return real(run)

        monkeypatch.setattr(Generation, "__next__", following)

    yield interrupt
    signal.signal(signal.SIGINT, handler)  # at its end a program sets another


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def engine(folder) -> minitri.Engine:
    return load(folder)


@pytest.fixture(scope="session")
def real_weights() -> Path:
    """The embedded default model's GGUF file, fetched if need be."""
    try:
        return locate("smollm2-135m").path
    except InputError as error:
        pytest.skip(f"the real weights cannot be fetched: {error}")


@pytest.fixture(scope="session")
def long_text() -> str:
    from minitri.apps.cli.inputs import demo_text

    return demo_text()


def ends_of(events) -> list[End]:
    return sorted((event for event in events if isinstance(event, End)), key=lambda end: end.row)


def texts_of(events) -> list[tuple[int, ...]]:
    return [end.token_ids for end in ends_of(events)]


def settings_of(
    method: str = "autoregressive",
    num_new: int = 24,
    sampling: SamplingParams = GREEDY,
    *,
    prefill_chunk: int = 1024,
    seed: int = 0,
    **speculation,
) -> dict[str, object]:
    """What `generate` and `complete` are given for texts of just this length."""
    return {
        "sampling": sampling,
        "generation": GenerationConfig(num_new, ignore_eos=True, prefill_chunk=prefill_chunk),
        "speculation": SpeculationConfig(method, **speculation),
        "seed": seed,
    }


def tiny_engine(*, noise: float | None = 0.02) -> Engine:
    """An engine without files, whose drafter is near to its model (`noise=None`: n-grams)."""
    model = tiny_model(tiny_config(vocab_size=320, context_length=512))
    draft = None if noise is None else near_copy(model, noise)
    return Engine(model, Tokenizer(byte_level_tokenizer()), draft)


def check_parts(message: str) -> None:
    """Asserts that a message is one line of moderate length that ends with advice."""
    assert message.isprintable(), message
    assert len(message) < 1000, message
    assert "; " in message, message


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """A block that ends with an error whose message has these words."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    check_parts(message)
    assert all(word in message for word in words), message
