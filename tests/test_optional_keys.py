"""Optional keys of files and requests: what null, false, 0 and what is empty mean.

Null is as good as absent in all of them.
"""

import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from minitri.apps.serve.chats.chat_body import FIELDS, ApiError, Message, checked
from minitri.apps.serve.protocol import ChatBody, ResponseBody, TextBody
from minitri.core.errors import InputError
from minitri.files.gguf.file import GgufFile
from minitri.files.hf_config import read_config, read_sampling
from tests.conftest import SHAPE
from tests.files.test_checkpoint import as_gguf

TABLE = Path(__file__).with_name("optional_keys.txt").read_text("utf-8").splitlines()
"""Rows of a place, a key, and for each value: = if it means the same as an absent key, + if it
means something else, ! if it is refused, ~ if a warning says that it is left out; and the name in
lines about it, if it is another."""
VALUES = [json.loads(value) for value in TABLE[0].split()[2:8]]
ROWS = [line.split() for line in TABLE[1:]]
ABSENT = object()
BODIES = {"completions": TextBody, "chat": ChatBody, "responses": ResponseBody, "message": Message}
FILES = {
    "config": SHAPE | {"model_type": "llama"},
    "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "generation": {"repetition_penalty": 1.2, "top_k": 5},
    "chat": {"messages": [{"role": "user"}]},
    "responses": {"input": "a"},
    "message": {"role": "assistant"},
}


def read(place: str, key: str, value: object, file: GgufFile) -> object:
    """What a file or a body means where a key has this value. Raises an error if it is refused."""
    known = file.metadata if place == "gguf" else FILES.get(place, {})
    content = {name: known[name] for name in known if name != key}
    content |= {} if value is ABSENT else {key: value}
    if place == "gguf":
        present = {name: value for name, value in content.items() if value is not None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "metadata", present)
            return file.config("x")
    if place == "rope":
        place, content = "config", FILES["config"] | {"rope_scaling": content}
    readers = {"config": read_config, "generation": read_sampling}
    return readers[place](content, "x") if place in readers else checked(BODIES[place], content)


@pytest.fixture(scope="module")
def file(folder, tmp_path_factory) -> GgufFile:
    return GgufFile(as_gguf(folder, tmp_path_factory.mktemp("files") / "x.gguf"))


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_key_means_what_the_table_says_and_lines_about_it_name_it(row, file, caplog):
    place, key, *cells = row
    [name] = cells[len(VALUES) :] or [key.rpartition(".")[2]]
    caplog.set_level(logging.WARNING)
    for value, cell in zip(VALUES, cells, strict=False):
        caplog.clear()
        found = line = None
        try:
            found, line = read(place, key, value, file), caplog.text
        except (ApiError, InputError) as error:
            line = str(error)
        if line:
            assert name in line
            assert cell == ("!" if found is None else "~"), line
        elif cell == "+":
            with suppress(ApiError, InputError):  # for a key that has to be there
                assert found != read(place, key, ABSENT, file)
        else:
            assert (cell, found) == ("=", read(place, key, ABSENT, file))
    for value in (-1, 2**32 - 1) if key.endswith("_token_id") else ():
        assert read(place, key, value, file) == read(place, key, ABSENT, file)


def test_the_table_has_all_fields_of_bodies_and_all_values_that_ask_for_nothing():
    """Fields of several endpoints are listed with those of the first one."""
    for place, kind in BODIES.items():
        rows = {key for other, key, *_ in ROWS if other in (place, "completions", "chat")}
        assert {*kind.model_json_schema()["properties"]} <= rows
    assert {*FIELDS["neutral"]} <= {key for _, key, *_ in ROWS}
