"""The program that renders chat templates in a process with limits; `chat_template.py` starts it.

A template comes from anywhere. Jinja's sandbox keeps it away from Python, but one expression may
ask for any time and memory, and Jinja computes constants before it renders anything: only limits of
a process help. Each line of input is JSON, a template and its variables; the answer is a line with
`text` or `error`. Nothing of minitri is imported, to start fast.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from contextlib import suppress

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
    """Refuses a conversation; a template calls this as `raise_exception`."""
    raise TemplateError(message)


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox with the filters and functions that `transformers` offers."""
    sandbox = ImmutableSandboxedEnvironment(
        extensions=[GenerationBlock, loopcontrols], trim_blocks=True, lstrip_blocks=True
    )
    # Jinja's own filter escapes HTML.
    sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    sandbox.globals["raise_exception"] = complain
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox


def main(seconds: float, num_bytes: int) -> None:
    """Renders each line of standard input until it ends; a line beyond limits ends the process."""
    with suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = functools.cache(environment().from_string)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of computing, not of waiting
        try:
            source, variables = json.loads(line)
            template = compiled(source)  # also without variables, to find what is wrong in it
            answer = {"text": template.render(variables) if variables else ""}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:999]}"}
        print(json.dumps(answer), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
