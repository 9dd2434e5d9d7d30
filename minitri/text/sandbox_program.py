"""The program of a sandbox: reads what strangers send, in a process with limits.

One template expression, or a grammar of 40 bytes, can take any time and memory; a grammar of 60 KB
can overflow a thread's stack, which ends the whole process. A line of input is a question in JSON,
its answer a JSON line, `text` or `error`. Of minitri it imports at most the answering module."""

import datetime
import functools
import importlib
import json
import re
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationBlock(Extension):
    """Jinja tags `{% generation %}` and `{% endgeneration %}`, marks for training: ignored."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def complain(message: str) -> None:
    """Refuses a conversation for the reason `message`: `raise_exception` of chat templates."""
    raise TemplateError(message)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    extensions=[GenerationBlock, loopcontrols], trim_blocks=True, lstrip_blocks=True
)
"""Jinja's sandbox with the filters and functions that `transformers` offers."""
ENVIRONMENT.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)  # no HTML
ENVIRONMENT.globals["raise_exception"] = complain
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
compiled = functools.cache(ENVIRONMENT.from_string)


def render(question: Any) -> str:
    """Renders a chat template; `question` is a list of its source and its variables."""
    source, variables = question
    return compiled(source).render(variables)


def check_grammar(source: Any) -> str:
    """Compiles a grammar in llguidance's JSON, over bytes as tokens; returns its error, or ""."""
    from llguidance import LLMatcher, LLTokenizer

    text = re.sub(r"<\[[\d,^* -]*\]>", "<[256]>", source)  # tokens of a model's vocabulary
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
    if not matcher.is_error():
        matcher.compute_logit_bias()
    return matcher.get_error()


def main(kind: str, seconds: float, num_bytes: int) -> None:
    """Answers each line of standard input by the function `kind`, or `answer` of the module `kind`.
    After `seconds` of CPU time for a line the process ends; `num_bytes` limit its memory."""
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)  # with none, threads have 2 MiB
    stack = min(most if most > 0 else 1 << 21, 1 << 23) // 2  # less than a thread of minitri has
    limits = {resource.RLIMIT_STACK: stack, resource.RLIMIT_AS: num_bytes, resource.RLIMIT_CORE: 0}
    for what, limit in limits.items():
        with suppress(ValueError):  # the limit is lower already
            resource.setrlimit(what, (limit, limit))
    answer_to = globals().get(kind) or importlib.import_module(kind).answer
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of computing, not of waiting
        try:
            answer = {"text": answer_to(json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:999]}"}
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
