"""Durable file access for tables on local disks: files are flushed before a commit refers to them.

pyiceberg does not flush written files. After a power loss the catalog, which SQLite keeps durable, would refer to
metadata that was never written, and the table would be unreadable.

Invariants:
* A closed metadata file, manifest or manifest list is on the disk, and so is its directory entry.
* Other addresses (`s3://`) are passed through.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from mansio.spark.iceberg.parquet_writer import fsync_directory_entry

if TYPE_CHECKING:
    from pyiceberg.io import OutputStream


class FsyncOnCloseFile(io.FileIO):
    """A file that is flushed when it is closed. Raises OSError if that fails."""

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
        """pyiceberg's file, flushed when it is closed."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return io.BufferedWriter(FsyncOnCloseFile(self._path, "wb" if overwrite else "xb"), self._buffer_size)


class DurableFileIO(PyArrowFileIO):
    """pyiceberg's file access, durable for `file://`."""

    def new_output(self, location: str) -> PyArrowFile:
        """A new file."""
        file = super().new_output(location)
        if self.parse_location(location, self.properties)[0] != "file":
            return file
        return _DurableFile(location, file._path, file._filesystem, file._buffer_size)
