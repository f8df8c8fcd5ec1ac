"""File access for tables of this machine's disks: what a commit refers to is on the disk before the commit.

pyiceberg leaves written files to the operating system. After a loss of power the catalog, which SQLite keeps safe,
would then point to metadata that were never written, and the whole table would be unreadable.

Always true: a metadata file, manifest or list of manifests that was closed is on the disk, and so is its name.
Addresses of other kinds (`s3://`) are passed on untouched.
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
    """A file that is on the disk when it is closed. Raises OSError if it is not."""

    def close(self) -> None:
        """Sync the file and its name, then close."""
        if self.closed:
            return
        try:
            os.fsync(self.fileno())
        finally:
            super().close()
        fsync_directory_entry(str(self.name))


class _DurableFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        """As the file it stands for, but synced when it is closed."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        return io.BufferedWriter(FsyncOnCloseFile(self._path, "wb" if overwrite else "xb"), self._buffer_size)


class DurableFileIO(PyArrowFileIO):
    """pyiceberg's own file access, durable for `file://`."""

    def new_output(self, location: str) -> PyArrowFile:
        """A file to be written."""
        file = super().new_output(location)
        if self.parse_location(location, self.properties)[0] != "file":
            return file
        return _DurableFile(location, file._path, file._filesystem, file._buffer_size)
