"""Grammar matchers: masks of the tokens that may come next, computed by `llguidance`.

The library sees the exact bytes of our tokens. A process with limits compiles each grammar first
(`sandbox.py`). The compiled grammars used last are kept. Every row has its own matcher, which is
advanced along guesses and rolled back when they are rejected.
Legend: V vocab."""

import json
import re
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.stats import Tokens, num_common
from minitri.text.grammar import MAX_CHARACTERS, Grammar
from minitri.text.sandbox import Sandbox
from minitri.text.tokenizer import Tokenizer

SANDBOX = Sandbox("check_grammar", 1, 1 << 30)  # 1 s and 1 GiB
SHORT = MAX_CHARACTERS // 8  # characters of a short grammar; each takes up to 500 bytes compiled
MAX_ITEMS = 10_000  # of llguidance's parser for a mask: 0.1 s, or 1,500 properties of an object


class GrammarMatcher:
    """Place of one text in its grammar, with the tokens that may follow: the core's `Matcher`."""

    def __init__(self, start: Any, config: ModelConfig) -> None:
        """Makes the state at the start of a text from `start`, a new `LLMatcher` of llguidance."""
        self._matcher = start
        self._config = config  # its vocabulary may be smaller than the tokenizer's
        self._path: Tokens = []  # tokens that the library has read after the committed ones
        self._is_over = False
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by path, for several levels

    def extend(self, tokens: Tokens) -> None:
        """Advances the state by accepted tokens of the text."""
        self._is_over |= not self._read(tokens)
        self._path = []
        self._masks.clear()

    def forbidden(self, path: Tokens) -> Tensor | None:
        """Boolean (V,): tokens that may not follow the accepted text and the guesses `path`.
        End tokens may follow a complete text. After an end token, or a guess that the grammar
        does not allow, they alone may follow. None if llguidance failed."""
        key = tuple(path)
        if key not in self._masks:
            is_over = self._is_over or not self._read(path)
            mask = bytearray(self._matcher.compute_logit_bias())[: self._config.vocab_size]
            self._masks[key] = None
            if not self._matcher.is_error():
                is_bad_V = (torch.frombuffer(mask, dtype=torch.uint8) == 0) | is_over
                ends = [*self._config.eos_token_ids]
                is_bad_V[ends] = not (is_over or self._matcher.is_accepting())
                self._masks[key] = is_bad_V
        return self._masks[key]

    @property
    def error(self) -> str:
        """Why llguidance's matcher failed, in one line; "" if it did not."""
        return error_of(self._matcher.get_error())

    def _read(self, path: Tokens) -> bool:
        """Makes the library read `path` in place of earlier guesses, as far as the grammar allows.
        Returns whether all of `path` is allowed and has no end token."""
        common = num_common(path, self._path)
        self._matcher.rollback(len(self._path) - common)
        words = [*takewhile(lambda token: token not in self._config.eos_token_ids, path)]
        count = common + self._matcher.try_consume_tokens(words[common:])
        self._path = path[:count]
        return count == len(path)


def compiled(grammar: Grammar, tokenizer: Tokenizer, config: ModelConfig) -> Any:
    """A new `LLMatcher` (llguidance) of a grammar over a model's tokens, at the start of a text.
    Raises `InputError`."""
    compile_kept = compile_short if len(grammar.text) < SHORT else compile_long
    start = grammar.start or compile_kept(grammar, lexicon_of(tokenizer, config))
    return start.deep_copy()


@lru_cache(4)
def lexicon_of(tokenizer: Tokenizer, config: ModelConfig) -> Any:
    """Vocabulary of a tokenizer, with the model's end tokens, as an `LLTokenizer` of llguidance.
    Raises `InputError` if the library or an end token is absent."""
    if not config.eos_token_ids:
        raise InputError(f"{config.name} has no end-of-sequence token for a grammar; use another")
    with explain("llguidance does not run", "pip install 'minitri[grammar]'"):
        import llguidance

        size = max(config.vocab_size, tokenizer.num_tokens)
        return llguidance.LLTokenizer(tokenizer.pipeline.to_str(), size, [*config.eos_token_ids])


def schema_text(text: str, **options: object) -> str:
    """The JSON schema `text` with llguidance's `options`, and a limit of white space, which some
    models never end. Raises `ValueError` for numbers that llguidance rounds, unless `lenient`."""
    schema = json.loads(text, parse_int=int if options.get("lenient") else as_exact)
    if not isinstance(schema, dict):
        return text
    how = {"whitespace_pattern": r"[ \n]{0,16}", **schema.get("x-guidance", {}), **options}
    return json.dumps({**schema, "x-guidance": how}, allow_nan=False)


def as_exact(digits: str) -> int:
    """Converts digits in a schema to an integer. Raises `ValueError` if llguidance rounds it."""
    number = int(digits)
    if abs(number) >= 1 << 63 or float(number) != number:
        raise ValueError(f"llguidance rounds the number {shorten(digits, 40)}")
    return number


NOT_FORCED = '%llguidance {"no_forcing": true}'
"""An option of llguidance, without which masks allow only one tokenization of forced text."""


def compile_grammar(grammar: Grammar, lexicon: Any) -> Any:
    """An `LLMatcher` of a grammar over `lexicon`, a result of `lexicon_of`. Raises `InputError`."""
    from llguidance import LLMatcher, LLParserLimits

    text = grammar.text
    with explain(f"the {grammar.kind} cannot be used", "correct it"):
        if grammar.kind == "choice":  # Lark writes texts as JSON does
            text = "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, json.loads(text)))
        elif grammar.kind == "regex":
            text = json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        elif grammar.kind != "lark":
            text = "start: %json " + schema_text(text or '{"type": "object"}')
        source = LLMatcher.grammar_from_lark(f"{text}\n{NOT_FORCED}")
        error = probe(source)
        if not error:
            limits = LLParserLimits(step_max_items=MAX_ITEMS, verbose_errors=False)
            matcher = LLMatcher(lexicon, source, log_level=0, limits=limits)
            matcher.compute_logit_bias()
            error = matcher.get_error()
        if error:
            problem = error_of(error)
            if grammar.kind != "lark":  # the user did not write the text that has these lines
                problem = re.sub(r"^line \d+, column \d+: ", "", problem)
            raise ValueError(problem)
    return matcher


# Two caches: 32 short grammars take as much memory as 4 long ones, which do not evict them.
compile_short = lru_cache(32)(compile_grammar)
compile_long = lru_cache(4)(compile_grammar)


@lru_cache(32)
def probe(source: str) -> str:
    """Compiles a grammar (llguidance's JSON) in a process with limits; returns its error, or ""."""
    try:
        return SANDBOX.ask(source)
    except ValueError as error:
        return str(error)


def error_of(error: str) -> str:
    """Shortens an error message of llguidance to one line that a user can read."""
    text = re.split(r"\n *1 \||\n<state>", error)[0]
    text = re.sub(r"(at )?(\d+)\((\d+)\)", r"line \2, column \3", text)
    text = re.sub("NoExtensionBias(.|\n)*", "it allows no text", text)
    return shorten(text.replace("failed to compile JSON schema: ", ""))
