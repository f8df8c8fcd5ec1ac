"""The expiry of a certificate is read as OpenSSL prints it, and anything else is refused."""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.authentication.certificate_fields import read_expiry_s
from mansio.state.authentication.der import InvalidDer
from support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = bytes.fromhex("170d") + b"260101000000Z"


def element(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    return bytes([tag, len(content)]) + content


def certificate(*times: bytes) -> bytes:
    """The beginning of a certificate (version, serial number, algorithm, issuer, validity)."""
    fields = (element(0xA0, b"\x02\x01\x02"), b"\x02\x01\x01", element(0x30), element(0x30))
    return element(0x30, element(0x30, *fields, element(0x30, *times)))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (element(0x17, b"491231235959Z"), datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (element(0x18, b"20510101000000Z"), datetime(2051, 1, 1, tzinfo=UTC)),
        (element(0x18, b"99991231235959Z"), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_both_forms_of_time_are_read(end: bytes, expected: datetime) -> None:
    assert read_expiry_s(certificate(BEGIN, end)) == expected.timestamp()


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        element(0x30),
        certificate(),
        certificate(BEGIN),
        certificate(BEGIN, element(0x17, b"269999999999Z")),
    ],
)
def test_what_has_no_expiry_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidDer):
        read_expiry_s(encoded)


@given(encoded=st.binary(max_size=80), position=st.integers(0, 80), byte=st.integers(0, 255))
def test_a_damaged_certificate_is_read_or_refused(encoded: bytes, position: int, byte: int) -> None:
    damaged = bytearray(certificate(BEGIN, BEGIN))
    damaged[position % len(damaged)] = byte
    for each in (encoded, bytes(damaged)):
        with contextlib.suppress(InvalidDer):
            read_expiry_s(each)


def test_the_expiry_is_that_which_openssl_prints(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=str(authority.certificate))
    (known,) = context.get_ca_certs()
    encoded = ssl.PEM_cert_to_DER_cert(authority.certificate.read_text())
    assert read_expiry_s(encoded) == ssl.cert_time_to_seconds(str(known["notAfter"]))
