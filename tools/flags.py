"""Types of flags that only tools have."""

from minitri.apps.cli.arguments import whole


def positive(text: str) -> int:
    """The type of a flag that no settings class checks, for a whole number above 0."""
    if (number := whole(text)) < 1:
        raise ValueError
    return number
