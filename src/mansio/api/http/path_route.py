"""Route that matches the segments of a request's path before they are decoded.

A name in a path is one segment. `%2F`, `%2E%2E` and `%00` in it are data, and so are `+` and `;` (RFC 3986, 2.2 and
3.3); a segment that is empty is no name. No request is redirected to another path. A path that is not percent-encoded
UTF-8 is refused, because two spellings of it could mean one name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote_to_bytes

from starlette.routing import Match, Route

from mansio.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

_SEGMENTS: Final = "mansio.path_segments"
"""Key in the scope of a request, which all routes examine."""

_MALFORMED: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")


def path_segments(scope: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the decoded segments of the path of an ASGI scope, the one before the first `/` left out.

    Raises `InvalidRequest` for a path that is not percent-encoded UTF-8."""
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    try:
        if _MALFORMED.search(raw) is None:
            return tuple(unquote_to_bytes(each).decode() for each in raw.split(b"/")[1:])
    except UnicodeDecodeError:
        pass
    raise InvalidRequest("the path is not percent-encoded UTF-8 (RFC 3986)")


class PathRoute(Route):
    """Route of `path`, whose segments are literals or `{name}`; each name is a path parameter that is not empty."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        methods: Sequence[str] | None = None,
    ) -> None:
        super().__init__(path, endpoint, methods=methods)
        segments = path.split("/")[1:]
        self._count = len(segments)
        self._literals = [(at, each) for at, each in enumerate(segments) if not each.startswith("{")]
        self._names = [(at, each[1:-1]) for at, each in enumerate(segments) if each.startswith("{")]

    def matches(self, scope: Any) -> tuple[Match, Any]:
        """Compare the segments of the request's path. Raises `InvalidRequest`."""
        if scope["type"] != "http":
            return Match.NONE, {}
        segments = scope.get(_SEGMENTS)
        if segments is None:
            segments = scope[_SEGMENTS] = path_segments(scope)
        if len(segments) != self._count or any(segments[at] != each for at, each in self._literals):
            return Match.NONE, {}
        names = {name: segments[at] for at, name in self._names}
        if not all(names.values()):
            return Match.NONE, {}
        is_method = self.methods is None or scope["method"] in self.methods
        return Match.FULL if is_method else Match.PARTIAL, {"endpoint": self.endpoint, "path_params": names}
