"""Chat templates: how a model wants a conversation written, in Jinja, as its files say.

A template comes from anywhere, so it runs in Jinja's sandbox, which keeps it away from Python, and
within limits of time and size. It can use what `transformers` offers, so the result is the same.
"""

import datetime
import functools
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minitri.errors import explain

MAX_SECONDS = 5.0
MAX_SIZE = 1 << 28
"""For a rendering: characters of all texts and items of all lists that it makes."""
ADVICE = "write the prompt without --chat, or correct the template"

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class ChatTemplate:
    """A model's template, ready to render conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are texts of `bos_token` and the like. Raises `InputError`."""
        self._environment = Environment()
        with explain("the model's chat template is not valid", ADVICE):
            self._template = self._environment.from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation as text, up to where the next answer begins. Raises `InputError`."""
        with explain("the model's chat template fails", ADVICE):
            self._environment.deadline = time.monotonic() + MAX_SECONDS
            self._environment.room = MAX_SIZE
            return self._template.render(
                messages=[*messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates use, and limits of time and size."""

    intercepted_binops = frozenset(["+", "*", "**"])
    deadline = 0.0
    room = 0

    def __init__(self) -> None:
        extensions = [GenerationBlock, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        # Jinja's own filter would escape what means something in HTML.
        self.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        self.globals["raise_exception"] = complain
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def _parse(self, *source: Any) -> nodes.Template:
        """Has loops look at the clock, and `~` put its texts together by `concat`."""
        tree = super()._parse(*source)
        for loop in tree.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(call("spend", nodes.Const(0))))
        for chain in tree.find_all(nodes.Concat):
            texts = [nodes.Filter(it, "string", [], [], None, None) for it in chain.nodes]
            chain.nodes = [call("concat", nodes.List(texts))]
        return tree

    def spend(self, size: int) -> None:
        """Raises `TemplateError` where there is neither time nor room for more."""
        self.room -= size
        if self.room < 0 or time.monotonic() > self.deadline:
            raise TemplateError(f"it makes too much of something, or takes {MAX_SECONDS:g} seconds")

    def concat(self, pieces: Iterable[str]) -> str:
        """What a template, a block or a macro writes."""
        found = []
        for piece in pieces:
            self.spend(len(piece))
            found.append(piece)
        return "".join(found)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A sum, product or power, if it is not too large."""
        size = 1 + sum(len(it) for it in (left, right) if isinstance(it, Sized))
        factors = math.prod(abs(it) for it in (left, right) if isinstance(it, int))
        self.spend(size if operator == "+" else size * factors)
        return super().call_binop(context, operator, left, right)


def call(method: str, argument: nodes.Expr) -> nodes.Call:
    """The call of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [argument], [], None, None)


class GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks answers for training; ignored."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def complain(message: str) -> None:
    """What a template calls where a conversation does not suit it."""
    raise TemplateError(message)
