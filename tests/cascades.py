"""Engines over tiny models, without files, and what their runs give."""

from minitri.core.requests import End
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.engine import Engine
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer, tiny_model
from tests.core.rigs import GREEDY, near_copy, tiny_config


def ends_of(events) -> list[End]:
    """How the requests of a run ended, in their order."""
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
    return Engine(model, Tokenizer(TokenizersBackend(byte_level_tokenizer()), None), draft)
