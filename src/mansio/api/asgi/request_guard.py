"""Guard of HTTP requests against web pages of other sites.

A page in a browser on this machine or network can send requests to the broker, and the browser adds the certificate,
or the user and the password, that it has for the broker. Three rules keep it from doing harm:

* The Host header is a loopback name, an IP address, or one of the setting `http_host_names`; otherwise a name whose
  address changes to that of the broker would make the page one of the same site (DNS rebinding).
* A request with the Origin of another site, or that a browser marks as one of another site, is refused.
* A request that changes something, with a body that a form can send, needs the header `X-Mansio-Request`. A page of
  another site can send such a body without asking (CORS), but not the header.

Source: Fetch standard (CORS-safelisted requests), W3C Fetch Metadata.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from mansio.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.requests import Request

REQUEST_HEADER: Final = "x-mansio-request"

_LOOPBACK_NAMES: Final = ("localhost", "ip6-localhost")
_SAFE_METHODS: Final = ("GET", "HEAD")
_FORM_TYPES: Final = ("", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain")


class ForbiddenRequest(RequestError):
    """The request may come from a web page of another site."""

    kafka_code = 44  # POLICY_VIOLATION
    grpc_status = "PERMISSION_DENIED"
    http_status = 403


class MisdirectedRequest(RequestError):
    """The Host header is no name of this broker."""

    http_status = 421


def check_host_and_origin(request: Request, host_names: Collection[str]) -> None:
    """Check the headers Host, Origin and Sec-Fetch-Site. `host_names`: names that are accepted in Host, in lower case.

    Raises `MisdirectedRequest`, `ForbiddenRequest`."""
    host = request.headers.get("host", "")
    if not _is_accepted(host, host_names):
        raise MisdirectedRequest(f"Host {host[:100]!r} is no name of this broker: add it to http_host_names")
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ForbiddenRequest("a page of another site sent this request")
    origin = request.headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        raise ForbiddenRequest(f"a page of another site sent this request: Origin {origin[:100]!r}")


def check_form_body(request: Request) -> None:
    """Check a request that changes something: raises `ForbiddenRequest` if a form of any site can send it."""
    if request.method in _SAFE_METHODS or REQUEST_HEADER in request.headers:
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    if kind in _FORM_TYPES and (has_body or request.method == "POST"):
        raise ForbiddenRequest(
            f"a request with the body type {kind or '(none)'!r} needs the header X-Mansio-Request: 1, or another"
            " Content-Type, for example application/json or application/octet-stream"
        )


def check_image_request(request: Request) -> None:
    """Check a GET request of a protocol in which it can change something: raises `ForbiddenRequest` if an image of a
    page can send it, which has no Origin and, over http, no Sec-Fetch-Site."""
    if request.method in _SAFE_METHODS and not {REQUEST_HEADER, "authorization"} & {*request.headers}:
        raise ForbiddenRequest("a GET request needs the header Authorization or X-Mansio-Request")


def _is_accepted(host: str, host_names: Collection[str]) -> bool:
    name = _host_name(host)
    if not name:
        return False
    if name in _LOOPBACK_NAMES or name.endswith(".localhost") or name in host_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return the name in a Host header, in lower case, without port and brackets; "" if it is malformed."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
