"""Differences between the supported versions of Spark, and the code that handles each of them.

| difference | 4.1 | 4.2, 4.3 |
|---|---|---|
| limit of a micro-batch | `latestOffset()` has no arguments | `latestOffset(start, limit)` |
| Trigger.AvailableNow | one batch, then the query ends | batches up to the end offsets at the start |
| `latestOffset` in a query's progress | the end of the batch | the end of the topics (`reportLatestOffset()`) |
| offsets in a query's progress | text of a Python dictionary | JSON |
| `to_arrow_type` of a timestamp | in UTC | in a zone that the caller names (4.3) |

Other modules import these names from here, and do not look at the version. They are written for the newest version;
what this module contains for an older one can be deleted when that version is no longer supported.

Invariants:
* A micro-batch never exceeds the limit that the options set, whatever the version and the trigger.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import re
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol

from pyspark import __version__ as _installed_version
from pyspark.sql.datasource import DataSourceStreamReader

from mansio.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from pyspark.sql.types import DataType
else:
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxRows,
            ReadMinRows,
            SupportsTriggerAvailableNow,
        )
    except ImportError:  # Spark 4.1: only the reader of this project passes limits to itself
        from dataclasses import dataclass

        class ReadLimit:
            """A limit of a micro-batch."""

        @dataclass
        class ReadAllAvailable(ReadLimit):
            """No limit."""

        @dataclass
        class ReadMaxRows(ReadLimit):
            """A maximum number of rows."""

            max_rows: int

        @dataclass
        class ReadMinRows(ReadLimit):
            """A minimum number of rows."""

            min_rows: int

        SupportsTriggerAvailableNow = object  # Spark would not look for it


__all__ = [
    "HAS_ADMISSION_CONTROL",
    "PROGRESS_HAS_LATEST_OFFSETS",
    "SUPPORTED_VERSIONS",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxRows",
    "ReadMinRows",
    "SupportsTriggerAvailableNow",
    "adapt_stream_reader",
    "check_spark_version",
    "parse_progress_offsets",
    "start_available_now",
    "to_arrow_type",
]

logger = logging.getLogger(__name__)

SUPPORTED_VERSIONS: Final = ((4, 1), (4, 2), (4, 3))
"""The supported (major, minor) versions of PySpark; pyproject.toml has the same range."""

HAS_ADMISSION_CONTROL: Final = hasattr(DataSourceStreamReader, "getDefaultReadLimit")
"""Whether Spark passes start and limit to `latestOffset`, as it does since 4.2.

Without it Spark calls `latestOffset()`, and the reader has to know where the previous batch ended
(`StreamReaderWithoutArguments`).
"""

PROGRESS_HAS_LATEST_OFFSETS: Final = HAS_ADMISSION_CONTROL
"""Whether `latestOffset` in the progress of a query is the end of the topics (`reportLatestOffset`, since 4.2). In 4.1
it is the end of the batch.
"""

AVAILABLE_NOW_HINT: Final = (
    "If the query has Trigger.AvailableNow or Trigger.Once: Spark 4.1 runs one batch of a source in Python with it."
    " Start the query with mansio.spark.start_available_now, which runs all batches, or use Spark 4.2 or newer"
)


def check_spark_version(version: str = _installed_version) -> None:
    """Raise `ConfigError` for a version of PySpark that is not supported, with the remedy."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) not in SUPPORTED_VERSIONS:
        oldest, newest = (".".join(map(str, one)) for one in (SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]))
        raise ConfigError(
            f"PySpark {version} is installed, and Mansio supports {oldest} to {newest}: pip install"
            f" 'pyspark[sql]=={newest}.*'"
        )


# -- admission control --------


class AdmissionControlledStreamReader(Protocol):
    """Interface of a stream reader with admission control (`ReadLimit`), as Spark 4.2 and newer call it."""

    def initialOffset(self) -> dict[str, Any]: ...
    def getDefaultReadLimit(self) -> ReadLimit: ...
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]: ...
    def reportLatestOffset(self) -> dict[str, Any] | None: ...
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]: ...
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]: ...
    def commit(self, end: dict[str, Any]) -> None: ...
    def stop(self) -> None: ...


def adapt_stream_reader(reader: AdmissionControlledStreamReader) -> DataSourceStreamReader:
    """Return the reader to give to the installed version of Spark."""
    if HAS_ADMISSION_CONTROL and isinstance(reader, DataSourceStreamReader):
        return reader
    return StreamReaderWithoutArguments(reader)


class StreamReaderWithoutArguments(DataSourceStreamReader):
    """Adapter of a stream reader for Spark 4.1, which calls `latestOffset` without start and limit.

    The start of a batch is the end of the previous one: Spark runs a planned batch before it plans the next. After a
    restart Spark first calls `partitions(end, end)` with the end of the last batch in the checkpoint, before any other
    method. If this batch was not complete, Spark runs it again before it plans the next.
    """

    def __init__(self, reader: AdmissionControlledStreamReader) -> None:
        self._reader = reader
        self._end: dict[str, Any] | None = None
        """End offsets of the last batch; None if none was planned."""
        self._planned_batches = 0

    def initialOffset(self) -> dict[str, Any]:
        """Return the start offsets of a query without a checkpoint."""
        return self._reader.initialOffset()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # the signature of 4.1
        """Return the end offsets of the next micro-batch, within the limit of the options."""
        start = self._reader.initialOffset() if self._end is None else self._end
        self._end = self._reader.latestOffset(start, self._reader.getDefaultReadLimit())
        self._planned_batches += self._end != start
        return self._end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the inputs of the tasks of one micro-batch."""
        self._end = end
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of one task."""
        return self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Pass the call to the reader."""
        self._reader.commit(end)

    def stop(self) -> None:
        """Close the reader. Warn if the query may have ended before the end of the topics, because of its trigger."""
        latest = self._reader.reportLatestOffset()
        if self._planned_batches == 1 and latest is not None and _is_behind(self._end or {}, latest):
            logger.warning(
                "the query read one batch and stopped; there are more records. %s", AVAILABLE_NOW_HINT
            )
        self._reader.stop()


def _is_behind(end: Mapping[str, Any], latest: Mapping[str, Any]) -> bool:
    return any(
        offset > end.get(topic, {}).get(partition, 0)
        for topic, partitions in latest.items()
        for partition, offset in partitions.items()
    )


# -- Trigger.AvailableNow --------


def start_available_now(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query that processes the records that exist now, in batches of the configured size, and then ends.

    The same as `writer.trigger(availableNow=True).start()` with every supported version of Spark. With Spark 4.1 that
    trigger would end the query after one batch. There the query runs with a processing-time trigger, and is stopped
    when it has no more data. It ends at the records that exist at its start if each of its sources has the option
    `stopAtLatest`; without the option it also reads records that are appended meanwhile.
    """
    if HAS_ADMISSION_CONTROL:
        return writer.trigger(availableNow=True).start()
    query = writer.trigger(processingTime="0 seconds").start()
    threading.Thread(target=_stop_when_idle, args=(query,), name="mansio-available-now", daemon=True).start()
    return query


def _stop_when_idle(query: StreamingQuery) -> None:
    """Stop the query when it has processed all data. The caller gets an error of the query from `awaitTermination`."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    with suppress(PySparkException, Py4JError, OSError):
        query.processAllAvailable()
        query.stop()


# -- types --------


def to_arrow_type(kind: DataType) -> pa.DataType:
    """Return the Arrow type of a type of Spark, with timestamps in UTC."""
    from pyspark.sql.pandas import types

    convert: Any = types.to_arrow_type
    if "timezone" in inspect.signature(convert).parameters:
        return convert(kind, timezone="UTC")
    return convert(kind)


# -- progress --------


def parse_progress_offsets(text: str | None) -> object:
    """Parse the offsets of a source in the progress of a query; None if they are missing or invalid.

    PySpark 4.1 formats them with `str` in `StreamingQuery.lastProgress`, so they are text of a Python dictionary there,
    but JSON in the events of a listener.
    """
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
