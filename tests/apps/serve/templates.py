"""Chat templates that treat tools as those of the families do, in few words.

The end token is that of the tiny model. What counts: which fields of a message are looked at, and
what is refused: ids of other lengths than nine, and several calls by Llama's.
"""

from pathlib import Path

TEMPLATE = Path(__file__).with_name("tools.jinja").read_text("utf-8")


def template_of(opening: str, closing: str, key: str = "arguments", most: int = 9) -> str:
    """The template of a family that writes calls like this, and at most so many in a message."""
    template = TEMPLATE.replace("OPENING", opening).replace("CLOSING", closing)
    return template.replace("KEY", key).replace("MOST", str(most))


FAMILIES = {
    "hermes": template_of("<tool_call>\\n", "\\n</tool_call>"),
    "llama3": template_of("", "", "parameters", most=1),
    "mistral": template_of("[TOOL_CALLS] [", "]"),
}
QWEN = FAMILIES["hermes"]
THINKING = QWEN + "{{- '<think>\\n' }}"
"""Opens a thought; answers before have none, as their texts are without it."""
