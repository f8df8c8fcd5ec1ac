"""What a SQLite database holds once its write-ahead log is applied: bytes in, bytes out.

SQLite does that itself when it opens a file, but it needs room on the disk for it and cannot be kept from writing the
result back. Here a file is looked at without being touched.

Always true: what is applied ends with the last commit whose frames are all whole, as in SQLite's own recovery.

Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from typing import Final

_HEADER = struct.Struct(">8I")  # magic, version, page size, sequence, salts, checksums
_FRAME = struct.Struct(">6I")  # page number, pages after a commit or 0, salts, checksums
_MAGIC: Final = 0x377F0682  # the last bit: words are big-endian in checksums
_VERSION: Final = 3_007_000
_MASK: Final = 0xFFFFFFFF


def with_wal(database: bytes, wal: bytes) -> bytes:
    """The database file with every whole commit of its write-ahead log."""
    if len(wal) < _HEADER.size:
        return database
    magic, version, page_bytes, _, *rest = _HEADER.unpack_from(wal)
    salts, found = tuple(rest[:2]), tuple(rest[2:])
    order = ">" if magic & 1 else "<"
    sums = _checksum(order, wal[:24], (0, 0))
    if magic | 1 != _MAGIC | 1 or version != _VERSION or sums != found:
        return database
    if page_bytes < 512 or page_bytes & (page_bytes - 1) or page_bytes > 65536:
        return database
    pages: dict[int, bytes] = {}
    committed: dict[int, bytes] = {}
    page_count = 0
    position = _HEADER.size
    while position + _FRAME.size + page_bytes <= len(wal):
        number, after_commit, first_salt, second_salt, *found_sums = _FRAME.unpack_from(wal, position)
        page = wal[position + _FRAME.size : position + _FRAME.size + page_bytes]
        sums = _checksum(order, page, _checksum(order, wal[position : position + 8], sums))
        if (first_salt, second_salt) != salts or not number or sums != tuple(found_sums):
            break
        pages[number] = page
        if after_commit:
            committed, page_count = dict(pages), after_commit
        position += _FRAME.size + page_bytes
    if not page_count:
        return database
    merged = bytearray(database.ljust(page_count * page_bytes, b"\0")[: page_count * page_bytes])
    for number, page in committed.items():
        if number <= page_count:
            merged[(number - 1) * page_bytes : number * page_bytes] = page
    return bytes(merged)


def _checksum(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    """The running checksum of whole pairs of 32-bit words."""
    first, second = sums
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for left, right in zip(words, words, strict=True):
        first = (first + left + second) & _MASK
        second = (second + right + first) & _MASK
    return first, second
