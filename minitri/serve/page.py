"""What people look at: the page at `/`, one file without outside resources, and `/docs`."""

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse

from minitri import GenerationConfig, SamplingParams
from minitri.cli.arguments import field_texts
from minitri.serve import protocol

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


async def docs(_: Request) -> HTMLResponse:
    """The endpoints and their fields, from what checks them."""
    about = field_texts(SamplingParams) | field_texts(GenerationConfig)
    lines = ["<!doctype html><title>minitri: endpoints</title><h1>Endpoints</h1>"]
    lines += ["<p>GET /v1/models, GET /health, and, as OpenAI documents them:"]
    for path, known in (("completions", protocol.TEXT), ("chat/completions", protocol.CHAT)):
        lines.append(f"<h2>POST /v1/{path}</h2><dl>")
        for name in sorted(known | {*protocol.SUPPORTED}):
            text = about.get(name, "")
            if name not in known:
                values = ", ".join(map(json.dumps, protocol.SUPPORTED[name]))
                text = f"{text} Accepted: {values}, or nothing.".strip()
            if name in protocol.IGNORED:
                text = "Ignored."
            if name in protocol.OWNERS:
                text = "With keys, cached prompts are shared only by requests that say the same."
            lines.append(f"<dt><code>{html.escape(name)}</code><dd>{html.escape(text)}")
        lines.append("</dl>")
    return HTMLResponse("\n".join(lines), headers=HEADERS)
