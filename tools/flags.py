"""Types of flags that only tools have."""

import argparse
from pathlib import Path

from minitri.apps.cli.arguments import number_from

positive = number_from(1)  # the type of a flag that no settings class checks


def picture(text: str) -> Path:
    """The type of a flag for a picture to draw, by matplotlib or by Pillow, which it brings."""
    import matplotlib  # noqa: F401  (if it is missing, says so before minutes of measuring)

    if Path(text).suffix not in (".png", ".gif") or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no .png or .gif file in a folder that exists")
    return Path(text)
