"""Pages for people in a browser: each is one HTML file without outside resources."""

import base64
import hashlib
import re

import jinja2
from starlette.responses import HTMLResponse

PAGES = jinja2.Environment(loader=jinja2.PackageLoader("minitri.apps.serve", "pages"))


def page(name: str) -> HTMLResponse:
    """Response with a file of pages/; its policy allows only its script, style and this server."""
    text = PAGES.get_template(name).render()
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action "
    policy += "'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    for tag, content in re.findall(r"<(script|style)>(.*?)</\1>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"; {tag}-src 'sha256-{digest}'"
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers | {"cache-control": "no-cache"})
