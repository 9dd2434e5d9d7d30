"""Hook of mkdocs: names of code, as `minitri/core/stack.py::Stack.admit`, link to the lines."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"`((?:\w+/)+\w+\.py)(?:::([\w.]+))?`")


def on_files(files: Any, config: Any) -> None:
    """Links the names in chapters, and adds a page for each file that they name."""
    paths = set[str]()
    for chapter in files.documentation_pages():
        paths |= {path for path, _ in NAME.findall(chapter.content_string)}
        chapter.content_string = NAME.sub(link, chapter.content_string)
    for path in paths:
        code = f"# {path}\n\n~~~~ {{.python linenums=1}}\n{(ROOT / path).read_text('utf-8')}~~~~\n"
        files.append(File.generated(config, f"{path}.md", content=code))


def link(match: re.Match[str]) -> str:
    """To the line where the last part of a name is defined. Fails if a part is not."""
    path, label = match[1], match[0].strip("`").rpartition("/")[2]
    parts = [rf"^ *(?:def|class) {part}\b" for part in (match[2] or "").split(".") if part]
    above = re.match(".*?".join(["", *parts]), (ROOT / path).read_text("utf-8"), re.M | re.S)
    line = len(above[0].splitlines()) or 1
    return f'<a href="{path}.html#line-0-{line}"><code>{label}</code></a>'
