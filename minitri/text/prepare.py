"""Prepares requests for a run: encodes prompts, draws seeds, checks settings."""

from dataclasses import replace

from minitri.core.config import ModelConfig
from minitri.core.decoding.text_filters import TextFilters
from minitri.core.errors import InputError
from minitri.core.fields import expect
from minitri.core.model.llama import Llama
from minitri.core.requests import Request, RequestState
from minitri.core.settings import SamplingParams
from minitri.text.matcher import GrammarMatcher, compiled
from minitri.text.prompt_ids import as_seeds, check_prompt, draw_seed, encode_prompt
from minitri.text.tokenizer import StreamDetokenizer, Tokenizer


def prepare_all(requests: list[Request], model: Llama, tokenizer: Tokenizer) -> list[RequestState]:
    """Makes states of requests by `prepare`, numbered from 0. `InputError` names the request."""
    states = []
    for number, request in enumerate(requests):
        try:
            states.append(prepare(number, request, model, tokenizer))
        except InputError as error:
            where = f"request {number}: " if len(requests) > 1 else ""
            raise InputError(f"{where}{error}") from None
    return states


def prepare(number: int, request: Request, model: Llama, tokenizer: Tokenizer) -> RequestState:
    """Checks a request, encodes its prompt, and draws a missing seed, the same one on all ranks.
    `number` is the place of the request in the run: its events' `row`. Raises `InputError`."""
    expect(request, Request)
    prompt_ids = encode_prompt(request.prompt, tokenizer)
    check_prompt(prompt_ids, model.config, request.generation.max_new_tokens)
    draw = model.execution.ranks.ask_first
    [seed] = as_seeds([draw(draw_seed) if request.seed is None else request.seed], 1)
    # Checks tokens and grammar before any work; the text's filters are made at its admission.
    text_filters(request.sampling, [], tokenizer, model.config)
    return RequestState(
        number,
        replace(request, seed=seed),
        prompt_ids,
        StreamDetokenizer(tokenizer, prompt_ids, stop=request.generation.stop, shown=request.shown),
        lambda: text_filters(request.sampling, prompt_ids, tokenizer, model.config),
    )


def text_filters(
    sampling: SamplingParams, prompt: list[int], tokenizer: Tokenizer, config: ModelConfig
) -> TextFilters | None:
    """Logit bias, penalties, banned tokens and grammar of a new text after a prompt's token ids;
    None if `sampling` has none of these. Raises `InputError` for a token that the model lacks, or a
    grammar that does not compile."""
    by_probability = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if sampling == SamplingParams(*by_probability):
        return None
    vocab_size = config.vocab_size
    for token in dict(sampling.logit_bias):
        if token >= vocab_size:
            raise InputError(f"logit_bias has token {token} of {vocab_size} tokens; leave it out")
    matcher = None
    if sampling.grammar:
        matcher = GrammarMatcher(compiled(sampling.grammar, tokenizer, config), config)
    words = (ids for word in sampling.bad_words for ids in tokenizer.spellings(word))
    return TextFilters(
        sampling,
        prompt,
        vocab_size,
        end_tokens=config.eos_token_ids,
        bad_words=[ids for ids in words if max(ids) < vocab_size],
        matcher=matcher,
    )
