"""File access of pyiceberg for tables on local disks, which flushes files (fsync) before a commit refers to them.

pyiceberg does not flush the files that it writes. SQLite flushes the catalog. After a power loss the catalog could
therefore refer to a metadata file that was never written, and the table would be unreadable.

Invariants:
* When a metadata file, manifest or manifest list is closed, the file and its directory entry are on the disk.
* Files at other addresses (`s3://`) are written by pyiceberg unchanged.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from mansio.iceberg.fanout_writer import fsync_directory_entry

if TYPE_CHECKING:
    from pyiceberg.io import OutputStream


class FsyncOnCloseFile(io.FileIO):
    """A file that is flushed when it is closed. `close` raises OSError if the flush fails."""

    def close(self) -> None:
        """Flush the file and its directory entry, then close."""
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()
        fsync_directory_entry(str(self.name))


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        """Create the file; it is flushed when it is closed."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return io.BufferedWriter(FsyncOnCloseFile(self._path, "wb" if overwrite else "xb"), self._buffer_size)


class DurableFileIO(PyArrowFileIO):
    """pyiceberg's file access, with flushed files for `file://` addresses."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return a file to be written at this address."""
        file = super().new_output(location)
        if self.parse_location(location, self.properties)[0] != "file":
            return file
        return _DurableFile(location, file._path, file._filesystem, file._buffer_size)
