"""Who may ask. A web page can make a browser ask, too: under a name of its own that leads to this
machine (DNS rebinding), or as a page of another site; the headers Host and Origin tell."""

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
from minitri.core.errors import shorten
from minitri.core.fields import between

KEY_VARIABLE = "MINITRI_API_KEY"  # of the environment


class ApiError(Exception):
    """A request that is refused: an HTTP status, OpenAI's code for it, one line, and which field
    is wrong, if one is."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if status in (408, 429, 503) else {"x-should-retry": "false"}
        kind = {429: "requests"}.get(status, "invalid_request_error")
        kind = "server_error" if status >= 500 else kind
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.content: dict[str, Any] = {"error": error}


@dataclass(frozen=True)
class Access:
    """What the program is asked for about its clients."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: all."""
    allowed_host: Sequence[str] = ()
    """Another name under which clients reach the server; may be repeated."""
    allow_origin: Sequence[str] = ()
    """A site whose pages may ask, such as https://a.example; may be repeated."""
    api_key: str | None = None
    """What clients have to send. Default: MINITRI_API_KEY, or nothing."""
    api_key_file: str | None = None
    """More keys, one a line; a line with # in front is a comment."""
    share_prefixes: bool = False
    """With keys, too, let prompts begin with what is cached of other clients, who can tell."""
    max_requests_per_client: int | None = between(None, 1)
    """Requests of one key, or without keys of one address, that run or wait; more are answered with
    429. Default: half of all that may; all with one key, or without keys on this machine only."""

    @functools.cached_property
    def keys(self) -> list[str]:
        """All that are accepted; if there are none, none is asked for. Raises `InputError`."""
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
        is_own = is_address or host.partition(":")[0].lower() in names
        if not is_own or (origin.partition("://")[2] != host and origin not in self.allow_origin):
            got = f"it is for host {shorten(host, 60)}, by a page of {shorten(origin, 60)}"
            raise ApiError(403, "forbidden", f"{got}; see --allowed-host and --allow-origin")

    def admit(self, headers: Mapping[str, str], address: Sequence[Any] | None) -> str:
        """Who asks: which key, or without keys the host of the address. Raises `ApiError`."""
        if not self.keys:
            return address[0] if address else ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = [hmac.compare_digest(given.encode("latin-1"), key.encode()) for key in self.keys]
        if not (scheme.lower() == "bearer" and any(same)):
            message = "the API key is missing or wrong; send Authorization: Bearer KEY"
            error = ApiError(401, "invalid_api_key", message)
            error.headers["www-authenticate"] = "Bearer"
            raise error
        # The same on every server, for what they share.
        return f"key {hashlib.sha256(self.keys[same.index(True)].encode()).hexdigest()}"
