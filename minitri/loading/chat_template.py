"""Chat templates: how a model wants a conversation written, in Jinja, as its files say.

    template = tokenizer.chat_template
    template.render([{"role": "user", "content": "Who is Anne?"}])

A template comes with a model from anywhere, so it runs in Jinja's sandbox, which keeps it away from
Python, and within limits of time and size. What it can use is what `transformers` offers, so that
the result is the same.
"""

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minitri.errors import InputError, shorten

MAX_SECONDS = 5.0
MAX_CHARACTERS = 64 << 20
ADVICE = "write the prompt without --chat, or correct the template"

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class ChatTemplate:
    """A model's template, ready to render conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of `bos_token`, `eos_token` and the like.

        Raises `InputError` if the template is none.
        """
        with explained("is not valid"):
            self._template = Environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, and with `add_generation_prompt` the beginning of the answer.

        A special token that a message spells out counts as one, as in `transformers`. Raises
        `InputError` with the template's own message if the conversation does not suit it.
        """
        variables: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": None}
        variables |= {"documents": None, **self._special_tokens}
        pieces, size = [], 0
        with explained("fails"), within_seconds(MAX_SECONDS):
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"it writes more than {MAX_CHARACTERS >> 20} MB")
        return "".join(pieces)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates use."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = complain
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuses products that would fill the memory."""
        sizes = [len(x) if isinstance(x, str | list | tuple) else 1 for x in (left, right)]
        counts = [x if isinstance(x, int) else 1 for x in (left, right)]
        if operator == "**" or max(sizes) * max(counts) > MAX_CHARACTERS:
            raise TemplateError(f"it computes {shorten(f'{left!r} {operator} {right!r}', 40)}")
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks answers for training; ignored."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, **settings: Any) -> str:
    """Jinja's own filter would escape what means something in HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **settings})


def complain(message: str) -> None:
    """What a template calls where a conversation does not suit it."""
    raise TemplateError(message)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what a template may raise into an `InputError`."""
    try:
        yield
    except (
        TemplateError,
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        MemoryError,
        SyntaxError,
    ) as error:
        problem = shorten(error or type(error).__name__, 200)
        raise InputError(f"the model's chat template {what}: {problem}; {ADVICE}") from None


@contextmanager
def within_seconds(limit: float) -> Iterator[None]:
    """Raises `TemplateError` in code that takes longer: at its next line, in this thread."""
    end = time.monotonic() + limit
    before = sys.gettrace()

    def trace(*_: object) -> Callable[..., Any]:
        if time.monotonic() > end:
            raise TemplateError(f"it takes longer than {limit:g} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def read_chat_template(settings: Mapping[str, Any], stored: str | None) -> str | None:
    """The source that a tokenizer's settings (`tokenizer_config.json`) hold, or else `stored`; of
    several named ones the default. None if there is none; raises `TypeError` for nonsense."""
    source: Any = stored if stored is not None else settings.get("chat_template")
    if isinstance(source, list):
        named = {str(it.get("name")): it.get("template") for it in source if isinstance(it, dict)}
        source = named.get("default", next(iter(named.values()), None))
    if not (source is None or isinstance(source, str)):
        raise TypeError(f"chat_template is {shorten(repr(source), 60)}, not a text")
    return source


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name, by their names there."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
