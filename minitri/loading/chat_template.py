"""Chat templates: how a model wants a conversation written, in Jinja, as its files say.

    template = tokenizer.chat_template
    template.render([{"role": "user", "content": "Who is Anne?"}])

A template comes with a model from anywhere, so it runs in Jinja's sandbox, which keeps it away from
Python. What it can use is what `transformers` offers, so that the result is the same.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minitri.loading.values import explain

ADVICE = "write the prompt without --chat, or correct the template"

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""


class ChatTemplate:
    """A model's template, ready to render conversations."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of `bos_token`, `eos_token` and the like.

        Raises `InputError` if the template is none.
        """
        with explain("the model's chat template is not valid", ADVICE):
            self._template = Environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, and with `add_generation_prompt` the beginning of the answer.

        A special token that a message spells out counts as one, as in `transformers`. Raises
        `InputError` with the template's own message if the conversation does not suit it.
        """
        with explain("the model's chat template fails", ADVICE):
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what chat templates use."""

    intercepted_binops = frozenset(["**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = complain
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def call_binop(self, *_: Any) -> Any:
        raise TemplateError("it computes a power, which could take hours")


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
