"""Files with secrets: only their user may read them, and they are replaced as a whole."""

from __future__ import annotations

import os
from typing import Final

from mansio.host.atomic_file import TEMPORARY_SUFFIX, write_file_atomically
from mansio.host.disk import HostDisk

PRIVATE_FILE_MODE: Final = 0o600
PRIVATE_DIRECTORY_MODE: Final = 0o700


def write_private_file(path: str, data: bytes) -> None:
    """Replace the file atomically, or create it, with mode 0600 from the beginning. Blocks. Raises `OSError`."""
    descriptor = os.open(path + TEMPORARY_SUFFIX, os.O_WRONLY | os.O_CREAT, PRIVATE_FILE_MODE)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, PRIVATE_FILE_MODE)  # one that an interrupted write has left
    finally:
        os.close(descriptor)
    write_file_atomically(HostDisk(), path, data)


def make_private_directory(path: str) -> None:
    """Create the directory with mode 0700, or give it that mode. Raises `OSError`."""
    os.makedirs(path, PRIVATE_DIRECTORY_MODE, exist_ok=True)
    if os.stat(path).st_mode & 0o077:
        os.chmod(path, PRIVATE_DIRECTORY_MODE)
