"""The filters of a row that need its tokenizer: bad words as tokens, grammars as masks."""

from minitri.config import ModelConfig
from minitri.decoding.text_filters import TextFilters
from minitri.errors import InputError
from minitri.loading.tokenizer import Tokenizer
from minitri.settings import SamplingParams


def text_filters(
    sampling: SamplingParams, prompt: list[int], tokenizer: Tokenizer, config: ModelConfig
) -> TextFilters | None:
    """Those of a row; None if none of its filters looks at the text. Raises `InputError`."""
    if not sampling.reads_text:
        return None
    vocab_size = config.vocab_size
    for token in dict(sampling.logit_bias):
        if token >= vocab_size:
            got = f"logit_bias has token {token}, but {config.name} has {vocab_size} tokens"
            raise InputError(f"{got}; leave it out")
    words = [ids for word in sampling.bad_words for ids in tokenizer.spellings(word)]
    ends = config.eos_token_ids
    return TextFilters(sampling, prompt, vocab_size, end_tokens=ends, bad_words=words)
