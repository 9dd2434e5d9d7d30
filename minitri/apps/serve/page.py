"""Chat page for people in a browser: one HTML file without outside resources."""

import base64
import hashlib
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text("utf-8")


def _hash(tag: str) -> str:
    """Digest of a tag's only text, for the page's policy that allows no other script or style."""
    text = PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADERS = {
    "content-security-policy": f"default-src 'none'; connect-src 'self'; img-src data:; "
    f"script-src '{_hash('script')}'; style-src '{_hash('style')}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
