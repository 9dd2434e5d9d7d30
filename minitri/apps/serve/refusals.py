"""Responses for errors, of which clients see one line."""

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from minitri import InputError
from minitri.apps.serve.api_error import ApiError
from minitri.core.errors import FaultError, shorten

FIELD = re.compile(r"(?:the )?'?(\w+)[\w.\[\]]*'?(?: or \w+)? (?:is|has|cannot) ")
"""The wrong field, at the beginning of a message."""


def as_api_error(error: Exception) -> ApiError:
    """Error for the client; the traceback of a bug is in the log."""
    match error:
        case ApiError():
            return error
        case InputError():
            ways = (way for way in error.ways if "=" not in way)  # not by settings of the library
            message = str(InputError(error.message, *ways))
            if isinstance(error, FaultError):
                return ApiError(503, "unavailable", message)
            field = FIELD.match(message)
            return ApiError(400, "invalid_request", message, field and field[1])
        case HTTPException():
            refused = ApiError(error.status_code, "invalid_request", error.detail)
            refused.headers |= error.headers or {}  # which methods are allowed
            return refused
    message = f"a bug: {shorten(repr(error))}; see the server's log"
    return ApiError(500, "internal_error", message)


async def refuse(_: Request, error: Exception) -> JSONResponse:
    """Response for an error."""
    refused = as_api_error(error)
    return JSONResponse(refused.content, refused.status, refused.headers)
