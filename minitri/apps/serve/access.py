"""Flags of access control: API keys, and requests that a web page makes a browser send.

A page can do so under a name of its own that leads to this machine (DNS rebinding), which the
header Host shows. Before a page of another site sends JSON, a browser asks whether it may (CORS);
bodies of other types are refused where the headers show a page."""

import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from minitri.core.errors import InputError
from minitri.core.fields import between


@dataclass(frozen=True)
class Access:
    """Flags of `minitri serve` that say which clients may send requests, and how many."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all."""
    allowed_host: Sequence[str] = ()
    """Another name under which clients reach the server; may be repeated."""
    allow_origin: Sequence[str] = ()
    """A site whose pages may ask, such as https://a.example; may be repeated."""
    api_key: str | None = None
    """Key that clients have to send, or several with spaces between. Default: MINITRI_API_KEY, or
    none."""
    share_prefixes: bool = False
    """Reuse cached prompts of one API key for others too, who can tell it by the time."""
    max_requests_per_client: int | None = between(None, 1)
    """Texts of one client (a key, or without keys an address) that run or wait; more are refused
    with 429. Default: half of all; all if there is one key, or no key and only this machine."""

    @functools.cached_property
    def digests(self) -> set[str]:
        """SHA-256 digests of all valid API keys; empty if none is needed. Raises `InputError`."""
        text = os.environ.get("MINITRI_API_KEY") if self.api_key is None else self.api_key
        if text is None:
            return set()
        if not (keys := text.encode().split()):  # at spaces of ASCII alone
            raise InputError("an API key is empty, so that all could send it; give a text")
        return {hashlib.sha256(key).hexdigest() for key in keys}  # timing leaks nothing

    @property
    def is_for_one(self) -> bool:
        """Whether all requests are one client's: one key, or no key and only this machine."""
        is_local = self.host == "localhost" or self.host.startswith("127.")
        return len(self.digests) == 1 if self.digests else is_local
