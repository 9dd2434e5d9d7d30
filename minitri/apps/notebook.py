"""Generated text in a notebook: `IPython.display.HTML(as_html(end))` colors tokens by origin."""

import html

from minitri.core.requests import End

SHADES = {"draft": "#bde7bd", "retrieval": "#b5e3ea", "recovered": "#f4bcbc", "bonus": "#f3e2a9"}
"""Background color of tokens by origin."""


def as_html(end: End) -> str:
    """The text of an output as HTML, each token on the color of its origin, with a legend."""
    text = "".join(_shaded(token.text, token.origin) for token in end.tokens if token.text)
    legend = " ".join(_shaded(origin, origin) for origin in SHADES)
    return f'<pre style="white-space:pre-wrap">{text}</pre><small>{legend}</small>'


def _shaded(text: str, origin: str) -> str:
    style = f"background:{SHADES[origin]};color:black"
    return f'<span style="{style}" title="{origin}">{html.escape(text)}</span>'
