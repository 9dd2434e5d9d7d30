"""Structs that Python and C++ share: fields of one name, order and size, in both."""

import re
from unittest.mock import Mock

import pytest

from minitri.devices.cpu.abi import DOUBLE, INTEGER, POINTER, LinearArguments, Struct, check_sizes
from minitri.devices.cpu.build import SOURCE

STRUCTS = Struct.__subclasses__()
TYPES = {"int64_t": INTEGER, "double": DOUBLE} | {struct.__name__: struct for struct in STRUCTS}


def fields_in_cpp(name: str) -> list[tuple[str, object]]:
    """Names and types of the fields of a struct, as the C++ files declare them."""
    text = "\n".join(file.read_text() for file in SOURCE.parent.glob("*.[ch]*"))
    body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL).group(1)
    fields = []
    for line in re.sub(r"//.*|\bconst\b", "", body).split(";")[:-1]:
        kind, *names = line.replace(",", " ").replace("* ", " *").split()
        for field in names:
            plain, _, count = field.rstrip("]").partition("[")
            one = POINTER if plain.startswith("*") else TYPES[kind]
            fields.append((plain.lstrip("*"), one * int(count) if count else one))
    return fields


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_fields_are_those_of_the_cpp_struct(struct):
    assert list(struct._fields_) == fields_in_cpp(struct.__name__)


def test_a_name_that_is_no_field_is_refused():
    with pytest.raises(AttributeError, match="LinearArguments.* has no attribute 'weight'"):
        LinearArguments(weight=None)


def test_a_library_with_structs_of_another_size_is_not_used():
    library = Mock(**{"minitri_sizeof.return_value": 0})
    with pytest.raises(OSError, match="AttentionArguments has another size in C"):
        check_sizes(library)
