"""Revocation lists are read as RFC 5280 defines them, and anything else is refused."""

from __future__ import annotations

import contextlib
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.state.authentication.der import InvalidDer
from mansio.state.authentication.revocation import RevocationLists, read_revocation_list
from support.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

NAME = bytes.fromhex("300d310b300906035504030c024141")


def element(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 0x80 else b"\x82" + size.to_bytes(2)
    return bytes([tag]) + length + content


def entry(serial: int) -> bytes:
    return element(0x30, element(0x02, serial.to_bytes(9)), element(0x17, b"260101000000Z"))


def revocation_list(*parts: bytes, next_update: bytes = b"", version: bytes = b"\x02\x01\x01") -> bytes:
    algorithm = element(0x30, element(0x06, b"\x2a"))
    made = element(0x17, b"260101000000Z")
    signed = element(0x30, version, algorithm, NAME, made, next_update, *parts)
    return element(0x30, signed, algorithm, element(0x03, b"\0"))


@pytest.mark.parametrize("version", [b"", b"\x02\x01\x01"])
def test_list_has_its_serial_numbers_and_its_validity(version: bytes) -> None:
    due = element(0x17, b"261231235959Z")
    entries = element(0x30, *(entry(number) for number in range(2000)))
    found = read_revocation_list(revocation_list(entries, next_update=due, version=version))
    assert found.issuer == NAME
    assert found.begins_s == datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    assert found.expires_s == datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp()
    assert len(found.serials) == 2000
    assert (1999).to_bytes(9) in found.serials
    later = read_revocation_list(revocation_list(next_update=element(0x18, b"20510101000000Z")))
    assert later.expires_s == datetime(2051, 1, 1, tzinfo=UTC).timestamp()
    assert later.serials == frozenset()
    assert RevocationLists([found, later]).expires_s == found.expires_s
    endless = read_revocation_list(revocation_list())
    assert endless.expires_s is None


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\x30",
        element(0x30),
        element(0x30, element(0x30)),
        revocation_list(next_update=element(0x17, b"269999999999Z")),
        revocation_list(element(0x30, element(0x31))),
        revocation_list(element(0x30, element(0x30, element(0x02, b"\1")))),
        revocation_list(
            element(
                0x30,
                element(
                    0x30,
                    element(0x02, b"\1"),
                    element(0x17, b"260101000000Z"),
                    element(0x30, element(0x30, bytes.fromhex("0603551d1d"), element(0x04))),
                ),
            )
        ),
    ],
)
def test_what_is_no_direct_list_is_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidDer):
        read_revocation_list(encoded)


@given(encoded=st.binary(max_size=200), position=st.integers(0, 200), byte=st.integers(0, 255))
def test_damaged_list_is_read_or_refused(encoded: bytes, position: int, byte: int) -> None:
    damaged = bytearray(revocation_list(element(0x30, entry(1), entry(2))))
    damaged[position % len(damaged)] = byte
    for each in (encoded, bytes(damaged)):
        with contextlib.suppress(InvalidDer):
            read_revocation_list(each)


def test_list_of_openssl_names_the_revoked_certificates_only(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "Other CA")
    revoked, valid, foreign = authority.issue(), authority.issue(), other.issue()
    text = authority.revocation_list(revoked)
    encoded = ssl.PEM_cert_to_DER_cert(text.replace("X509 CRL", "CERTIFICATE").strip() + "\n")
    lists = RevocationLists([read_revocation_list(encoded)])
    assert len(lists) == 1

    def der(path: Path) -> bytes:
        return ssl.PEM_cert_to_DER_cert(path.read_text())

    assert lists.is_revoked(der(revoked.certificate))
    assert not lists.is_revoked(der(valid.certificate))
    assert not lists.is_revoked(der(foreign.certificate))
