"""Chat templates: how a model wants a conversation written, in Jinja, as its files say.

A template comes from anywhere, so it runs in Jinja's sandbox, which keeps it away from Python. It
can use what `transformers` offers, so the result is the same.
"""

import datetime
import functools
import json
import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minitri.errors import explain

MAX_SIZE = 1 << 28
"""Of a product of numbers, or of a text or list and a number."""
ADVICE = "write the prompt without --chat, or correct the template"

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class ChatTemplate:
    """A model's template, ready to render conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are texts of `bos_token` and the like. Raises `InputError`."""
        extensions = [GenerationBlock, loopcontrols]
        environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # Jinja's own filter would escape what means something in HTML.
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = complain
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        with explain("the model's chat template is not valid", ADVICE):
            self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text, perhaps with the beginning of the answer. Raises `InputError`."""
        with explain("the model's chat template fails", ADVICE):
            return self._template.render(
                messages=[*messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which computes no product and no power that fills the memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = (len(it) if isinstance(it, Sized) else abs(it) for it in (left, right))
        if math.prod(sizes) > MAX_SIZE:
            raise TemplateError("it makes too much of something")
        return super().call_binop(context, operator, left, right)


class GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks answers for training; ignored."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def complain(message: str) -> None:
    """What a template calls where a conversation does not suit it."""
    raise TemplateError(message)
