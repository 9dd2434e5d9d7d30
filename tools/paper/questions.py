"""A question about a long text, with its answer: a hidden number.

A needle is one sentence with a seven-digit number at some depth of a text; the question after the
text asks for it, in the chat format of SmolLM2 and the words of RULER. As there, the answer has
been begun for the model, so that the query by which the retrieval cache is filled is the one that
looks for the number.
"""

from typing import NamedTuple

from minitri.core.errors import InputError
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
"""Tokens of an answer, at most."""


class Question(NamedTuple):
    """A prompt that ends where the answer begins."""

    prompt: list[int]
    answer: str

    def grade(self, said: str) -> float:
        """1 if the answer is in what was said, else 0."""
        return float(self.answer in said.replace(",", ""))


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
    return Question(prompt, str(number))
