"""Data files of tables: the description of a file with which a task reports that it was written.

The table refers to a file only after a commit. A task never accesses the catalog, and its modules do not import
pyiceberg: `to_data_file` of the module `commit` makes the entry.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

REPORT_SCHEMA: Final = "file string"
"""Spark schema of the descriptions of files that a task returns to the driver."""

PartitionValue = int | str | bool | None
"""A value of a partition field in a file's description."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A Parquet file that a task wrote, and the values of its partition fields. `is_sorted`: whether its rows have the
    table's sort order.
    """

    path: str
    rows: int
    bytes: int
    partition: tuple[PartitionValue, ...] = ()
    is_sorted: bool = False

    def to_json(self) -> str:
        """Return the text with which a task reports the file; `parse_written_file` reads it."""
        return json.dumps([self.path, self.rows, self.bytes, self.partition, self.is_sorted])


def parse_written_file(text: str) -> WrittenFile:
    """Parse the result of `WrittenFile.to_json`."""
    path, rows, size, partition, is_sorted = json.loads(text)
    return WrittenFile(path, rows, size, tuple(partition), is_sorted)


def report_files(files: Sequence[WrittenFile]) -> pa.RecordBatch:
    """Return the descriptions of files as rows of `REPORT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"file": pa.array([one.to_json() for one in files], pa.string())})
