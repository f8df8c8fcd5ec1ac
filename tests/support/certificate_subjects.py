"""Subjects of certificates for tests, in DER."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

UTF_8, NUMERIC, PRINTABLE, T61, IA5, VISIBLE, GENERAL, UNIVERSAL, BMP = (
    0x0C, 0x12, 0x13, 0x14, 0x16, 0x1A, 0x1B, 0x1C, 0x1E,
)  # fmt: skip
SEQUENCE, SET = 0x30, 0x31

COMMON_NAME, SERIAL_NUMBER, EMAIL = "2.5.4.3", "2.5.4.5", "1.2.840.113549.1.9.1"
ATTRIBUTES = (
    COMMON_NAME,
    SERIAL_NUMBER,
    EMAIL,
    "2.5.4.6",
    "2.5.4.7",
    "2.5.4.8",
    "2.5.4.9",
    "2.5.4.10",
    "2.5.4.11",
    "2.5.4.42",
    "0.9.2342.19200300.100.1.1",
    "0.9.2342.19200300.100.1.25",
    "2.999.3",
)


def element(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 + len(length)]) + length + content


def number(dotted: str) -> bytes:
    """An object identifier."""
    first, second, *others = map(int, dotted.split("."))
    content = b""
    for value in (first * 40 + second, *others):
        septets = [value & 0x7F]
        while value := value >> 7:
            septets.append(value & 0x7F | 0x80)
        content += bytes(reversed(septets))
    return element(0x06, content)


def attribute(kind: str, value: bytes, tag: int = UTF_8) -> bytes:
    return element(SEQUENCE, number(kind) + element(tag, value))


def subject(*names: Iterable[bytes]) -> bytes:
    """A subject of relative names, each with one or more attributes."""
    return element(SEQUENCE, b"".join(element(SET, b"".join(sorted(name))) for name in names))


def common_name(text: str, tag: int = UTF_8) -> bytes:
    return subject([attribute(COMMON_NAME, text.encode(), tag)])


def random_subject(random: Random) -> bytes:
    """A subject with all kinds of attributes, types and characters that every version of Java prints alike."""

    def one() -> bytes:
        tag = random.choice((UTF_8, UTF_8, PRINTABLE, T61, IA5, GENERAL, NUMERIC, VISIBLE, UNIVERSAL))
        characters = ' \r\n\0,=+<>#;"\\aB-_/' + "é€😀\u2028" * (tag == UTF_8)
        text = "".join(random.choice(characters) for _ in range(random.randrange(6)))
        value = text.encode("utf-32-be" if tag == UNIVERSAL else "utf-8")
        return attribute(random.choice(ATTRIBUTES), b"12 3" if tag == NUMERIC else value, tag)

    return subject(
        *([one() for _ in range(random.choice((1, 1, 1, 2, 3)))] for _ in range(random.randrange(4)))
    )
