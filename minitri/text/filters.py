"""The filters of a request that depend on its text: bad words as tokens, the grammar compiled."""

from minitri.core.config import ModelConfig
from minitri.core.decoding.text_filters import TextFilters
from minitri.core.errors import InputError
from minitri.core.settings import SamplingParams
from minitri.text.matcher import GrammarMatcher, compiled
from minitri.text.tokenizer import Tokenizer


def text_filters(
    sampling: SamplingParams, prompt: list[int], tokenizer: Tokenizer, config: ModelConfig
) -> TextFilters | None:
    """The text filters of a new row; None if its settings have none. Raises `InputError` for a
    token that the model lacks, and for a grammar that cannot be compiled."""
    if not sampling.reads_text:
        return None
    vocab_size = config.vocab_size
    for token in dict(sampling.logit_bias):
        if token >= vocab_size:
            got = f"logit_bias is for token {token}, but {config.name} has {vocab_size} tokens"
            raise InputError(f"{got}; leave it out")
    matcher = None
    if sampling.grammar is not None:
        matcher = GrammarMatcher(compiled(sampling.grammar, tokenizer, config), config)
    return TextFilters(
        sampling,
        prompt,
        vocab_size,
        end_tokens=config.eos_token_ids,
        bad_words=[ids for word in sampling.bad_words for ids in tokenizer.spellings(word)],
        matcher=matcher,
    )
