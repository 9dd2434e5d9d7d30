"""Errors as clients of OpenAI's API expect them: an HTTP status and one object of JSON."""

from starlette.exceptions import HTTPException

from minitri.core.errors import FaultError, InputError, shorten


class ApiError(Exception):
    """Error for a refused request: an HTTP status, OpenAI's code for it, and one line."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.content = {"error": {"message": message, "type": kind, "param": None, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """The HTTP error that reports an exception to the client."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, "invalid_request", error.detail)
        case InputError():
            ways = (way for way in error.ways if "=" not in way)  # not by settings of the library
            message = str(InputError(error.message, *ways))
            if isinstance(error, FaultError):
                return ApiError(503, "unavailable", message)
            return ApiError(400, "invalid_request", message)
    return ApiError(500, "internal_error", f"a bug: {shorten(repr(error))}; see the server's log")
