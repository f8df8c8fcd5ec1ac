"""Errors of the HTTP API as problem details (RFC 9457).

    {"type": "about:blank", "title": "UnknownTopicOrPartition", "status": 404, "detail": "there is no topic 'x'",
     "code": 3, "retriable": true, "errors": [{"pointer": "/records/3/value", "detail": "..."}]}

`title` is the name of the class in `mansio.errors` (of an error of HTTP itself the reason phrase), `code` is Kafka's
error code, and `errors` names the invalid fields: members of the body by JSON pointer (RFC 6901), and parameters.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_json
from starlette.responses import Response

from mansio.errors import InvalidRequest, MansioError, StorageError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import ValidationError
    from starlette.exceptions import HTTPException

RETRY_AFTER_S: Final = 1
FIELDS_MAX: Final = 20
"""Maximum number of invalid fields in a response."""

ERRORS_MAX: Final = 1_000
"""Number of invalid fields above which none of them is named."""

NAME_CHARACTERS_MAX: Final = 100
"""Characters of a name in a pointer; what is longer is cut off."""

PROBLEM_TYPE: Final = "application/problem+json"


class InvalidField(InvalidRequest):
    """A field of the request is invalid. `fields`: JSON pointer or name of a parameter, and the reason."""

    def __init__(self, pointer: str, detail: str, more: Iterable[tuple[str, str]] = ()) -> None:
        self.fields = [(pointer, detail), *more]
        super().__init__(f"{pointer}: {detail}" if pointer else detail)


def from_validation(error: ValidationError, prefix: str = "", first: int = 0) -> InvalidField:
    """Return the error for a body or parameters that do not have the form of their model. `prefix`: pointer to what was
    validated; `first`: number of the first element, where it was a part of a list."""
    if error.error_count() > ERRORS_MAX:  # pydantic creates an object for each, which takes some microseconds
        return InvalidField(prefix, f"{error.error_count()} fields are invalid")
    found = []
    for each in error.errors(include_url=False, include_context=False, include_input=False)[:FIELDS_MAX]:
        location = list(each["loc"])
        if first and location:
            location[0] = first + int(location[0])
        names = [str(part)[:NAME_CHARACTERS_MAX] for part in location]
        pointer = prefix + "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in names)
        found.append((pointer, each["msg"]))
    return InvalidField(*found[0], found[1:]) if found else InvalidField("", "the request is invalid")


def error_value(error: MansioError) -> dict[str, Any]:
    """Return the JSON value of the error of one record."""
    return {
        "title": type(error).__name__,
        "status": error.http_status,
        "detail": error.message,
        "code": error.kafka_code,
        "retriable": error.retriable,
    }


def problem(error: MansioError) -> Response:
    """Return the response to an error."""
    body = {"type": "about:blank", **error_value(error)}
    if isinstance(error, InvalidField):
        body["title"] = InvalidRequest.__name__
        body["errors"] = [{"pointer": pointer, "detail": detail} for pointer, detail in error.fields]
    headers = {}
    if error.http_status in (429, 503) or (
        isinstance(error, Unavailable) and not isinstance(error, StorageError)
    ):
        headers["retry-after"] = str(RETRY_AFTER_S)
    return Response(to_json(body), error.http_status, headers, PROBLEM_TYPE)


def http_problem(error: HTTPException) -> Response:
    """Return the response to an error of HTTP itself, for example an unknown path."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(error.status_code).phrase,
        "status": error.status_code,
        "detail": error.detail,
        "retriable": False,
    }
    return Response(to_json(body), error.status_code, dict(error.headers or {}), PROBLEM_TYPE)
