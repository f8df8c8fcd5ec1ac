"""Request and response headers, their versions and the exceptions of ApiVersions."""

from __future__ import annotations

import io
from typing import Any

import pytest
from kio.schema.request_header.v1 import RequestHeader as HeaderV1
from kio.schema.request_header.v2 import RequestHeader as HeaderV2
from kio.schema.response_header.v0 import ResponseHeader as ResponseV0
from kio.schema.response_header.v1 import ResponseHeader as ResponseV1
from kio.serial import entity_writer

from mansio.errors import WireError
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec.messages import REQUEST, RESPONSE, _schema
from mansio.wire.headers import (
    framed_response,
    read_correlation_id,
    read_request_header,
    read_response_header,
    read_unsigned_varint,
    request_header,
    response_header,
    unsigned_varint,
)
from unit.wire.kio_oracle import every_version


def by_kio(entity: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


@pytest.mark.parametrize("client_id", [None, "", "client", "\u00fc" * 200])
def test_headers_match_kio_in_every_version(client_id: str | None) -> None:
    for key, version, direction in every_version():
        schema = _schema(key, version, direction).__header_schema__
        if direction == REQUEST:
            assert schema in (HeaderV1, HeaderV2)
            expected = by_kio(
                schema(
                    request_api_key=key,
                    request_api_version=version,
                    correlation_id=-5,
                    client_id=client_id,
                )
            )
            assert request_header(key, version, -5, client_id) == expected
            frame = memoryview(bytearray(expected + b"body"))
            assert read_request_header(frame) == (key, version, -5, client_id, len(expected))
        else:
            assert direction == RESPONSE
            assert schema in (ResponseV0, ResponseV1)
            expected = by_kio(schema(correlation_id=9))
            assert response_header(key, version, 9) == expected
            assert read_response_header(key, version, expected + b"body") == (9, len(expected))
            whole = framed_response(key, version, 9, b"body")
            assert whole == (len(expected) + 4).to_bytes(4, "big") + expected + b"body"


def test_api_versions_response_header_never_has_tagged_fields() -> None:
    """KIP-511: the client reads it before it knows what the broker speaks."""
    for version in range(5):
        assert response_header(ApiKey.API_VERSIONS, version, 1) == b"\x00\x00\x00\x01"


def test_api_versions_request_of_an_unknown_version_has_a_header() -> None:
    frame = request_header(ApiKey.API_VERSIONS, 99, 3, "new") + b"\x01\x02whatever"
    assert read_request_header(frame)[:4] == (18, 99, 3, "new")


def test_request_of_an_unknown_api_has_a_header() -> None:
    assert read_request_header(b"\x7f\xff\x00\x01\x00\x00\x00\x02\xff\xff") == (32767, 1, 2, None, 10)


def test_tagged_fields_in_a_header_are_skipped() -> None:
    start = request_header(ApiKey.METADATA, 12, 1, "c")[:-1]
    tags = b"\x02\x00\x03abc\xff\x01\x00"
    assert read_request_header(start + tags + b"body").body_position == len(start + tags)


DECODE_ERRORS = {
    "empty": b"",
    "too short": b"\x00\x03\x00\x01\x00\x00\x00\x01\x00",
    "a client id longer than the frame": b"\x00\x03\x00\x01\x00\x00\x00\x01\x00\x05abcd",
    "a negative length": b"\x00\x03\x00\x01\x00\x00\x00\x01\xff\xfe",
    "a client id that is not UTF-8": b"\x00\x03\x00\x01\x00\x00\x00\x01\x00\x01\xff",
    "no tagged fields where they must be": b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff",
    "tagged fields longer than the frame": b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff\x01\x00\x7f",
    "more tagged fields than bytes": b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff\xff\xff\xff\xff\x0f\x00\x00",
    "a number without end": b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff" + b"\xff" * 9,
    "HTTP": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
    "TLS": bytes.fromhex("160301020001000001fc0303"),
}


@pytest.mark.parametrize("frame", DECODE_ERRORS.values(), ids=DECODE_ERRORS.keys())
def test_garbage_is_a_wire_error_or_an_unknown_api(frame: bytes) -> None:
    try:
        header = read_request_header(memoryview(frame))
    except WireError:
        return
    assert header.api_key not in list(ApiKey)


def test_garbage_in_responses_is_a_wire_error() -> None:
    for frame in (b"", b"\x00\x00\x00"):
        with pytest.raises(WireError):
            read_correlation_id(frame)
    with pytest.raises(WireError):
        read_response_header(ApiKey.METADATA, 12, b"\x00\x00\x00\x01")


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2**31 - 1, 2**32 - 1])
def test_unsigned_varint(value: int) -> None:
    data = unsigned_varint(value)
    assert read_unsigned_varint(b"x" + data, 1) == (value, 1 + len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x80\x80\x80\x80\x00", b"\xff\xff\xff\xff\x1f"])
def test_unsigned_varint_over_32_bits_or_truncated_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        read_unsigned_varint(data, 0)
