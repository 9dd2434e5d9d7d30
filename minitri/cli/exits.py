"""How a command ends: with an exit code and at most one line on standard error.

Imports nothing heavy, so that it can guard the imports that are.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from minitri.errors import InputError


@contextmanager
def clean_exits() -> Iterator[None]:
    """Bad input, Ctrl-C, a full disk and a closed pipe end the program with a code and at most one line."""
    try:
        yield
    except InputError as error:
        print(f"minitri: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("minitri: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(
            "minitri: no space left to write the output; free some, or send it elsewhere",
            file=sys.stderr,
        )
        sys.exit(2)
