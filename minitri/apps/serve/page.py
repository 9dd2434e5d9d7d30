"""Page for people: a chat, in one file without outside resources."""

import base64
import hashlib
import re
from pathlib import Path

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
