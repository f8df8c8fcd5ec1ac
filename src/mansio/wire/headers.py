"""Codec of request and response headers, and of unsigned varints and tagged fields.

Header versions depend on the API version (KIP-482), with two exceptions for ApiVersions (KIP-511): its responses always
have header version 0, so that a client can read them before it knows the broker; and a request in an unknown version
still has a readable header, so that the broker can respond with UNSUPPORTED_VERSION.

Invariants:
* Positions are bytes from the start of the frame, without the 4-byte length.
* A client id is a string with a 16-bit length in every header version, also in the flexible version 2.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey, is_flexible

if TYPE_CHECKING:
    from mansio.ports import Buffer

_REQUEST_START: Final = Struct(">hhih")
_RESPONSE_START: Final = Struct(">i")
_FRAMED_RESPONSE_START: Final = Struct(">ii")


TAGGED_FIELDS_MAX: Final = 100
"""Limit on the tagged fields of one struct, known or not. Kafka's structs have fewer than ten."""


class RequestHeader(NamedTuple):
    """Decoded header of a request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_position: int
    """Position of the first byte of the body in the frame."""


def read_request_header(frame: Buffer) -> RequestHeader:
    """Decode the header of a request frame. Raises `WireError` if the bytes are not a request header.

    Unknown API keys and versions are accepted: the caller responds with an error.
    """
    size = len(frame)
    if size < 10:
        raise WireError("a request shorter than its header")
    api_key, api_version, correlation_id, length = _REQUEST_START.unpack_from(frame)
    position = 10
    client_id: str | None = None
    if length >= 0:
        position += length
        if position > size:
            raise WireError("the client id is longer than the request")
        try:
            client_id = str(frame[10:position], "utf-8")
        except UnicodeDecodeError as error:
            raise WireError("the client id is not UTF-8") from error
    elif length != -1:
        raise WireError("a negative length of the client id")
    if is_flexible(api_key, api_version):
        if position < size and frame[position] == 0:
            position += 1
        else:
            position = skip_tagged_fields(frame, position)
    return RequestHeader(api_key, api_version, correlation_id, client_id, position)


def request_header(api_key: int, api_version: int, correlation_id: int, client_id: str | None) -> bytes:
    """Encode a request header, without the frame length."""
    tail = b"\x00" if is_flexible(api_key, api_version) else b""
    if client_id is None:
        return _REQUEST_START.pack(api_key, api_version, correlation_id, -1) + tail
    name = client_id.encode()
    return _REQUEST_START.pack(api_key, api_version, correlation_id, len(name)) + name + tail


def has_flexible_response_header(api_key: int, api_version: int) -> bool:
    """Whether responses of this API and version have a header with tagged fields; ApiVersions never has."""
    return api_key != ApiKey.API_VERSIONS and is_flexible(api_key, api_version)


def response_header(api_key: int, api_version: int, correlation_id: int) -> bytes:
    """Encode a response header, without the frame length."""
    start = _RESPONSE_START.pack(correlation_id)
    return start + b"\x00" if has_flexible_response_header(api_key, api_version) else start


def framed_response(api_key: int, api_version: int, correlation_id: int, body: Buffer) -> bytes:
    """Encode a response frame: length, header, and the encoded `body`."""
    if has_flexible_response_header(api_key, api_version):
        return b"".join((_FRAMED_RESPONSE_START.pack(len(body) + 5, correlation_id), b"\x00", body))
    return _FRAMED_RESPONSE_START.pack(len(body) + 4, correlation_id) + body


def read_correlation_id(frame: Buffer) -> int:
    """Return the correlation id of a response frame. Raises `WireError` if the frame is shorter than 4 bytes."""
    if len(frame) < 4:
        raise WireError("a response shorter than its header")
    return int(_RESPONSE_START.unpack_from(frame)[0])


def read_response_header(api_key: int, api_version: int, frame: Buffer) -> tuple[int, int]:
    """(correlation id, position of the body) of the response frame to a request of that API and version. Raises
    `WireError`."""
    correlation_id = read_correlation_id(frame)
    position = 4
    if has_flexible_response_header(api_key, api_version):
        position = skip_tagged_fields(frame, position)
    return correlation_id, position


def read_unsigned_varint(buffer: Buffer, position: int) -> tuple[int, int]:
    """(value, position after it) of an unsigned varint of at most 32 bits. Raises `WireError`."""
    try:
        byte = buffer[position]
        if byte < 0x80:
            return byte, position + 1
        value = byte & 0x7F
        for shift in (7, 14, 21, 28):
            position += 1
            byte = buffer[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 32:
                    raise WireError("a number of more than 32 bits")
                return value, position + 1
    except IndexError as error:
        raise WireError("the message ends within a number") from error
    raise WireError("a number of more than 5 bytes")


_ONE_BYTE: Final = tuple(bytes((number,)) for number in range(0x80))


def unsigned_varint(value: int) -> bytes:
    """Encode `value` as an unsigned varint, the format of lengths and tags in flexible messages (KIP-482)."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_tag_count(buffer: Buffer, position: int) -> tuple[int, int]:
    """Return the number of tagged fields of a struct, and the position behind it. Raises `WireError`."""
    count, position = read_unsigned_varint(buffer, position)
    if count > TAGGED_FIELDS_MAX:
        raise WireError(f"more than {TAGGED_FIELDS_MAX} tagged fields in one struct")
    return count, position


def skip_tagged_fields(buffer: Buffer, position: int) -> int:
    """Return the position after the tagged fields that begin at `position`. Raises `WireError`."""
    count, position = read_tag_count(buffer, position)
    for _ in range(count):
        _, position = read_unsigned_varint(buffer, position)
        length, position = read_unsigned_varint(buffer, position)
        position += length
        if position > len(buffer):
            raise WireError("a tagged field is longer than the message")
    return position
