"""Small files with a checksum that are replaced atomically.

A file is `head payload footer`. The head contains the magic number of the file type, its version and the payload
length; the footer is the CRC-32C of head and payload (docs/internals/file-format.md).

Invariants: `write_checksummed` leaves the old file or the new one, never a mixture; `read_checksummed` returns the
payload as it was written, or None.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from crc32c import crc32c

from mansio.host.atomic_file import write_file_atomically, write_temporary_file

if TYPE_CHECKING:
    from mansio.ports import Disk, DiskFile

_HEAD = struct.Struct(">8sHHI")  # magic, version, zero, payload length
_FOOTER = struct.Struct(">I")
TEMPORARY_SUFFIX = ".tmp"


def encode_checksummed(magic: bytes, version: int, payload: bytes) -> bytes:
    """Return the bytes of a checksummed file. `magic` is the 8-byte magic number of the file type."""
    body = _HEAD.pack(magic, version, 0, len(payload)) + payload
    return body + _FOOTER.pack(crc32c(body))


def decode_checksummed(magic: bytes, version: int, data: bytes) -> bytes | None:
    """Return the payload in `data`; None if `data` is damaged, or a file of another type or version."""
    if len(data) < _HEAD.size + _FOOTER.size:
        return None
    found_magic, found_version, _, length = _HEAD.unpack_from(data)
    if found_magic != magic or found_version != version or len(data) != _HEAD.size + length + _FOOTER.size:
        return None
    body = memoryview(data)[: -_FOOTER.size]
    if crc32c(body) != _FOOTER.unpack_from(data, len(body))[0]:
        return None
    return bytes(body[_HEAD.size :])


def write_checksummed(disk: Disk, path: str, data: bytes, *, durable: bool) -> None:
    """Replace the file at `path` by `data` (from `encode_checksummed`) atomically. Raises `OSError`.

    `durable`: content and name are on stable storage on return.
    """
    write_file_atomically(disk, path, data, suffix=TEMPORARY_SUFFIX, durable=durable)


def prepare_checksummed(disk: Disk, path: str, data: bytes) -> DiskFile:
    """Write `data` to the temporary file that will replace `path`. The caller syncs and renames it."""
    return write_temporary_file(disk, path, data, suffix=TEMPORARY_SUFFIX)


def read_checksummed(disk: Disk, path: str, magic: bytes, version: int) -> bytes | None:
    """Return the payload of the file at `path`; None if the file is missing, damaged, or of another type or version."""
    try:
        data = disk.read_file(path)
    except FileNotFoundError:
        return None
    return decode_checksummed(magic, version, data)
