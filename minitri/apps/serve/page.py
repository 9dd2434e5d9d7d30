"""What people look at: the page at `/`, one file without outside resources, and `/docs`."""

import base64
import dataclasses
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from minitri.apps.cli.arguments import field_texts
from minitri.apps.serve.protocol import IGNORED, Fields, Protocol
from minitri.core.fields import wanted

PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def _hashes(tag: str) -> str:
    """Of what stands in a tag of the page: nothing else is run, or gives it a style."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in found)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; img-src data:; "
    f"script-src {_hashes('script')}; style-src {_hashes('style')}; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def page(_: Request) -> HTMLResponse:
    """A chat, as a client of the endpoints."""
    return HTMLResponse(PAGE, headers=HEADERS)


def docs(protocol: Protocol, kinds: Mapping[str, type[Any]]) -> HTMLResponse:
    """The endpoints by their paths, and their fields, from what checks them."""
    lines = ["<!doctype html><title>minitri: endpoints</title><h1>Endpoints</h1>"]
    lines.append("<p>GET /v1/models, GET /v1/models/NAME, GET /health, and, as OpenAI and vLLM")
    lines.append(f"document them, these. Prompt and answer have {protocol.context} tokens.")
    fate = "refused" if protocol.ignored is None else "ignored, too"
    lines.append(f"Ignored: {', '.join(IGNORED)}. Others that ask for something are {fate}.")
    for path, kind in kinds.items():
        defaults = kind(**vars(protocol.sampling)) if issubclass(kind, Fields) else kind()
        bases = kind.__mro__[-2::-1]  # the last has the last word
        texts = {name: it for base in bases for name, it in field_texts(base).items()}
        lines.append(f"<h2>POST {path}</h2>")
        lines.append("<table><tr><th>field<th>what it does<th>what it may be<th>default")
        for field in sorted(dataclasses.fields(kind), key=lambda it: it.name):
            default = getattr(defaults, field.name)
            shown = "" if default in (None, "", ()) else json.dumps(default)
            cells = "<td>".join(map(html.escape, (texts[field.name], wanted(field), shown)))
            lines.append(f"<tr><td><code>{field.name}</code><td>{cells}")
        lines.append("</table>")
    return HTMLResponse("\n".join(lines), headers=HEADERS)
