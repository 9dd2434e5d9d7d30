"""Pages for people: the chat at `/`, one file without outside resources, and `/docs`."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse

from minitri.apps.serve.bodies.completion import ForModel
from minitri.apps.serve.bodies.strict_json import Json
from minitri.apps.serve.protocol import IGNORED, Protocol

PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def _hashes(tag: str) -> str:
    """Hashes of a tag's texts in the page: nothing else is run, or gives it a style."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
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


def docs(protocol: Protocol, endpoints: Mapping[str, tuple[type[ForModel], Any]]) -> HTMLResponse:
    """The endpoints by their paths, with the JSON schemas of their bodies."""
    lines = ["<!doctype html><title>minitri: endpoints</title><h1>Endpoints</h1>"]
    lines.append("<p>GET /v1/models, GET /v1/models/NAME, GET /health, and, as OpenAI and vLLM")
    lines.append(f"document them, these. Prompt and answer have {protocol.context} tokens.")
    fate = "refused" if protocol.ignored is None else "ignored, too"
    lines.append(f"Ignored: {', '.join(IGNORED)}. Others that ask for something are {fate}.")
    objects: dict[str, Any] = {}
    for path, (kind, _) in endpoints.items():
        schema = kind.model_json_schema()
        objects |= schema.get("$defs", {})
        lines += table(f"POST {path}", schema, vars(protocol.sampling))
    for name, schema in objects.items():
        lines += table(name, schema, {})
    return HTMLResponse("\n".join(lines), headers=HEADERS)


def table(title: str, schema: Json, defaults: Mapping[str, Any]) -> list[str]:
    """HTML of an object's fields; `defaults` are those of this server."""
    lines = [f"<h2>{title}</h2>"]
    lines.append("<table><tr><th>field<th>what it does<th>what it may be")
    for name, field in sorted(schema["properties"].items()):
        field |= {"default": defaults[name]} if name in defaults else {}
        text = " ".join(field.pop("description", "").split())
        field.pop("title", None)
        rest = {key: value for key, value in field.items() if value not in (None, "", [], ())}
        cells = map(html.escape, (text, json.dumps(rest)[1:-1]))
        lines.append(f"<tr><td><code>{name}</code><td>{'<td>'.join(cells)}")
    return [*lines, "</table>"]
