"""Writer of a task's rows as Parquet files, with one open file for each partition (Iceberg's fanout writer).

The writers of archives, result tables and batch jobs decide which rows belong together and describe the files; this
part buffers row groups, opens, closes and deletes files. Every file name is used once, so a task that runs twice writes
other files the second time; unused files are removed later as orphans.

Invariants:
* The rows of a file are in the order in which they were written.
* A file that was reported to `on_closed` is complete and, on a local file system, flushed to the disk.
* Memory is bounded by one Arrow batch, `BUFFERED_BYTES_MAX`, and the open files.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TARGET_FILE_BYTES: Final = 256 << 20
"""Size at which a file is closed and another one is started."""
OPEN_FILES_MAX: Final = 64
"""Maximum number of open files. With rows of more partitions the file that was opened first is closed."""
ROW_GROUP_BYTES: Final = 16 << 20
"""Size of a row group in memory: rows are buffered up to this size per file, and `BUFFERED_BYTES_MAX` for all files.
Arrow batches have a few thousand rows; row groups of that size take 50 percent longer to write and to read.
"""
BUFFERED_BYTES_MAX: Final = 64 << 20
WRITER_OPTIONS: Final[dict[str, Any]] = {"compression": "zstd", "compression_level": 1}

Partition = TypeVar("Partition")


@dataclass(slots=True)
class _OpenFile:
    path: str
    writer: pq.ParquetWriter
    sink: pa.NativeFile
    rows: int = 0
    buffered: list[pa.RecordBatch] = field(default_factory=list)
    buffered_bytes: int = 0


class FanoutWriter(Generic[Partition]):
    """The open files of one task. Call `write` for the rows of each partition, then `close`, or `abort` if the task
    fails.
    """

    def __init__(
        self,
        location: str,
        schema: pa.Schema,
        on_closed: Callable[[Partition, str, int, int], object],
        *,
        options: Mapping[str, Any] = WRITER_OPTIONS,
        file_bytes: int | None = TARGET_FILE_BYTES,
        is_durable: bool = True,
    ) -> None:
        """`location`: address of the directory. `on_closed`: called for each complete file with its partition, address,
        number of rows, and size in bytes. `options`: of pyarrow's `ParquetWriter`. `file_bytes`: size at which a file
        is closed; None: one file per partition. `is_durable`: whether files are flushed to a local disk.
        """
        self._location = location.rstrip("/")
        self._system, self._directory = file_system(self._location)
        self._schema = schema
        self._on_closed = on_closed
        self._options = options
        self._file_bytes = file_bytes
        self._is_durable = is_durable
        self._open: dict[Partition, _OpenFile] = {}
        self._buffered_bytes = 0
        self._closed_paths: list[str] = []

    @property
    def buffered_bytes(self) -> int:
        """Size in memory of the rows that are in no file yet."""
        return self._buffered_bytes

    def write(self, partition: Partition, rows: pa.RecordBatch, name: str) -> None:
        """Write rows with the columns of the schema. `name`: prefix of the file's name, if one has to be opened."""
        part = self._open.get(partition)
        if part is None:
            part = self._open_file(partition, name)
        size = rows.nbytes
        part.rows += rows.num_rows
        part.buffered.append(rows)
        part.buffered_bytes += size
        self._buffered_bytes += size
        if part.buffered_bytes >= ROW_GROUP_BYTES:
            self._write_buffered(part)
        elif self._buffered_bytes >= BUFFERED_BYTES_MAX:
            for one in self._open.values():
                self._write_buffered(one)
        if self._file_bytes is not None and part.sink.tell() + part.buffered_bytes >= self._file_bytes:
            self.close_file(partition)

    def close(self) -> None:
        """Close all files. Raises OSError."""
        for partition in list(self._open):
            self.close_file(partition)

    def close_file(self, partition: Partition) -> None:
        """Close the open file of a partition. Raises OSError: Spark then repeats the task, which writes other files."""
        part = self._open[partition]
        self._write_buffered(part)
        part.writer.close()
        part.sink.close()
        place = self._local_path(part.path)
        if self._is_durable and isinstance(self._system, fs.LocalFileSystem):
            fsync_file(place)
        size = self._system.get_file_info(place).size
        self._closed_paths.append(part.path)
        del self._open[partition]  # last, so that `abort` deletes the file after a failure
        self._on_closed(partition, part.path, part.rows, size)

    def abort(self) -> None:
        """Close and delete all files. No commit refers to them yet."""
        paths = [part.path for part in self._open.values()] + self._closed_paths
        for part in self._open.values():
            for close in (part.writer.close, part.sink.close):
                with suppress(OSError):  # a full disk fails on the footer of a file that is deleted anyway
                    close()
        self._open.clear()
        self._closed_paths.clear()
        self._buffered_bytes = 0
        for path in paths:
            self._system.delete_file(self._local_path(path))

    def _write_buffered(self, part: _OpenFile) -> None:
        """Write the buffered rows of a file as one row group."""
        if part.buffered:
            rows = pa.Table.from_batches(part.buffered, self._schema)
            part.writer.write_table(rows, row_group_size=rows.num_rows)
            self._buffered_bytes -= part.buffered_bytes
            part.buffered, part.buffered_bytes = [], 0

    def _open_file(self, partition: Partition, name: str) -> _OpenFile:
        if len(self._open) >= OPEN_FILES_MAX:
            self.close_file(next(iter(self._open)))
        path = f"{self._location}/{name}-{uuid.uuid4().hex}.parquet"
        sink = self._system.open_output_stream(self._local_path(path))
        try:
            writer = pq.ParquetWriter(sink, self._schema, **self._options)
        except OSError:
            with suppress(OSError):
                sink.close()
            self._system.delete_file(self._local_path(path))
            raise
        part = self._open[partition] = _OpenFile(path, writer, sink)
        return part

    def _local_path(self, path: str) -> str:
        """Return a file's path on its file system."""
        return self._directory + path[len(self._location) :]


def file_system(location: str) -> tuple[fs.FileSystem, str]:
    """Return the file system and path of an address; a local directory is created."""
    parts = urlsplit(location)
    if parts.scheme not in ("", "file"):
        system, place = fs.FileSystem.from_uri(location)
        return system, str(place)
    os.makedirs(parts.path, exist_ok=True)
    return fs.LocalFileSystem(), parts.path


# -- fsync --------


def fsync_directory_entry(path: str) -> None:
    """Flush the directory entry of a file. Raises OSError.

    This function is not in `fsync_io`, because tasks that write files do not import pyiceberg.
    """
    descriptor = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: str) -> None:
    """Flush a closed file and its directory entry."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_directory_entry(path)
