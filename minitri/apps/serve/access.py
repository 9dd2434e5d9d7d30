"""Access control: API keys, and requests that a web page makes a browser send.

A page can do so under a name of its own that leads to this machine (DNS rebinding), or as a page of
another site; the headers Host and Origin show it.
"""

import functools
import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minitri import InputError
from minitri.apps.cli.inputs import read_text
from minitri.apps.serve.api_error import ApiError
from minitri.core.errors import shorten
from minitri.core.fields import between

KEY_VARIABLE = "MINITRI_API_KEY"


@dataclass(frozen=True)
class Access:
    """Flags of the program about its clients."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all."""
    allowed_host: Sequence[str] = ()
    """Another name under which clients reach the server; may be repeated."""
    allow_origin: Sequence[str] = ()
    """A site whose pages may ask, such as https://a.example; may be repeated."""
    api_key: str | None = None
    """Key that clients have to send. Default: MINITRI_API_KEY, or none."""
    api_key_file: str | None = None
    """More keys, one a line; a line with # in front is a comment."""
    share_prefixes: bool = False
    """Share cached prefixes between API keys (leaks timing)."""
    max_requests_per_client: int | None = between(None, 1)
    """Requests of one key, or without keys of one address, that run or wait; more are answered with
    429. Default: half of all that may; all with one key, or without keys on this machine only."""

    @functools.cached_property
    def keys(self) -> list[str]:
        """All valid keys; without any, clients need none. Raises `InputError`."""
        key = os.environ.get(KEY_VARIABLE) if self.api_key is None else self.api_key
        keys = [] if key is None else [key]
        if self.api_key_file is not None:
            lines = map(str.strip, read_text(self.api_key_file, "--api-key-file").splitlines())
            keys += [line for line in lines if line and line[0] != "#"] or [""]
        if "" in keys:
            raise InputError("an API key is empty, so that all could send it; give a text")
        return keys

    @property
    def is_for_one(self) -> bool:
        """Whether all requests count as one client's: there is one key, or only this machine."""
        is_local = self.host == "localhost" or self.host.startswith("127.")
        return len(self.keys) == 1 if self.keys else is_local

    def check_site(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` where a page of another site makes a browser ask."""
        host = headers.get("host", "localhost")
        origin = headers.get("origin", f"http://{host}")
        is_address = re.fullmatch(r"([\d.]+|\[.*\])(:\d+)?", host)  # which no other site can have
        names = ("localhost", self.host, *self.allowed_host)
        is_known = is_address or host.partition(":")[0].lower() in names
        if not is_known or (origin.partition("://")[2] != host and origin not in self.allow_origin):
            got = f"it is for host {shorten(host, 60)}, by a page of {shorten(origin, 60)}"
            raise ApiError(403, "forbidden", f"{got}; see --allowed-host and --allow-origin")

    def admit(self, headers: Mapping[str, str], address: Sequence[Any] | None) -> str:
        """Client of a request: its key's digest, or without keys its address. Raises `ApiError`."""
        if not self.keys:
            return address[0] if address else ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in self.keys]
        if not (scheme.lower() == "bearer" and any(same)):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            error = ApiError(401, "invalid_api_key", message)
            error.headers["www-authenticate"] = "Bearer"
            raise error
        return f"key {hashlib.sha256(self.keys[same.index(True)].encode()).hexdigest()}"
