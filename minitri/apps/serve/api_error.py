"""Errors as clients of OpenAI's API expect them: an HTTP status and one object of JSON."""

from typing import Any


class ApiError(Exception):
    """Refused request: an HTTP status, OpenAI's code for it, one line, and the wrong field."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if status in (408, 429, 503) else {"x-should-retry": "false"}
        kind = {429: "requests"}.get(status, "invalid_request_error")
        kind = "server_error" if status >= 500 else kind
        error = {"message": message, "type": kind, "param": param, "code": code}
        self.content: dict[str, Any] = {"error": error}
