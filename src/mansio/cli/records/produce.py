"""`mansio produce`: publishes lines as records.

Invariants:
* Exit code 0 means that every record was acknowledged as `--acks` requires. Otherwise the error states how many were.
* Bytes are not changed. A pipe is read only when it has data, so that Ctrl-C is always handled.
* A record longer than `RECORD_BYTES_MAX` raises an error; it is not buffered further.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections import deque
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from mansio.cli.support.common import (
    DEFAULT_BOOTSTRAP_SERVERS,
    PARTITIONS_MAX,
    BootstrapServersOption,
    connect,
    parse_duration_s,
    parse_name_values,
    parse_time_option,
    run,
    unescape_separator,
    usage_error,
)
from mansio.cli.support.formatting import Output, count_text
from mansio.errors import InvalidRecord, MansioError
from mansio.ports import complete

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rich.progress import Progress

    from mansio.client.producer.accumulator import Delivery
    from mansio.client.producer.producer import Producer
    from mansio.client.types import Headers, RecordMetadata

PROGRESS_TASK_ID: Any = 0  # rich numbers its tasks from 0


class Acks(StrEnum):
    """Acknowledgement levels. all: flushed to disk; 1: in the leader's page cache; 0: none."""

    ALL = "all"
    ONE = "1"
    NONE = "0"


class CodecName(StrEnum):
    """Compression codecs."""

    NONE = "none"
    GZIP = "gzip"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    ZSTD = "zstd"


class PriorityName(StrEnum):
    """Priorities of records."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to publish to.")],
    file: Annotated[
        typer.FileBinaryRead | None,
        typer.Option("--file", "-f", metavar="FILE", help="Read this file instead of standard input."),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", metavar="KEY", help="The key of every record.")
    ] = None,
    key_separator: Annotated[
        str | None,
        typer.Option(
            "--key-separator", "-K", metavar="TEXT", help="Separator of key and value in each line."
        ),
    ] = None,
    delimiter: Annotated[
        str,
        typer.Option(
            "--delimiter", "-D", metavar="TEXT", help="Ends a record; empty: the whole input is one record."
        ),
    ] = r"\n",
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header; repeatable."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            max=PARTITIONS_MAX,
            metavar="N",
            help="Partition of all records, regardless of the key.",
        ),
    ] = None,
    codec: Annotated[CodecName, typer.Option("--codec", "-z", help="Compression codec.")] = CodecName.NONE,
    acks: Annotated[
        Acks,
        typer.Option(
            "--acks",
            help="Required acknowledgement. all: flushed to disk; 1: in the leader's page cache, which a power failure "
            "may lose; 0: none.",
        ),
    ] = Acks.ALL,
    null: Annotated[bool, typer.Option("--null", "-Z", help="An empty value is null (a tombstone).")] = False,
    delay: Annotated[
        str | None,
        typer.Option(
            "--delay", metavar="DURATION", help="Deliver the records after this time, for example 15m."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Deliver the records at this time, for example 2026-12-01T09:00+01:00.",
        ),
    ] = None,
    priority: Annotated[
        PriorityName | None,
        typer.Option("--priority", help="Deliver to share groups before, or after, other records."),
    ] = None,
    record_ids: Annotated[
        bool,
        typer.Option(
            "--record-ids",
            help="Give each record an id, the header mansio-id, with which mansio trace --id finds it.",
        ),
    ] = False,
    output: Annotated[
        Output | None,
        typer.Option(
            "--output",
            "-o",
            help="Print partition and offset of each record, one per line.",
        ),
    ] = None,
    bootstrap_servers: BootstrapServersOption = DEFAULT_BOOTSTRAP_SERVERS,
) -> None:
    """Publish each line of standard input (or of a file) as a record.

    Lines are bytes and are not changed. TEXT understands \\t, \\n, \\0 and \\xNN. Exit code 0 means that every record
    was acknowledged as --acks requires.
    """
    from mansio.cli.records.produce import RecordFormat

    if key is not None and key_separator is not None:
        usage_error("give either one key for all or a separator, not both", "--key-separator")
    if key_separator == "":
        usage_error("must not be empty", "--key-separator")
    record_format = RecordFormat(
        unescape_separator(delimiter),
        None if key is None else key.encode(),
        None if key_separator is None else unescape_separator(key_separator),
        null,
    )
    headers = tuple((name, value.encode()) for name, value in parse_name_values(header or (), "--header"))
    options: dict[str, Any] = {
        "codec": codec.value,
        "acks": "all" if acks is Acks.ALL else int(acks.value),
        "record_ids": record_ids,
    }
    command = ProduceCommand(
        topic,
        record_format,
        headers,
        partition,
        *_parse_delay(delay, at),
        None if priority is None else priority.value,
        ProduceProgress(output),
    )
    if file is None and sys.stdin is None:
        usage_error("standard input is closed; give a file", "--file")
    run(command.perform(bootstrap_servers, file or sys.stdin.buffer, options))


def _parse_delay(delay: str | None, at: str | None) -> tuple[float | None, datetime | None]:
    """Parse `--delay` and `--at`; exit code 2 if they are invalid."""
    from mansio.client.producer.delays import with_delay_header

    if delay is None and at is None:
        return None, None
    if delay is not None and at is not None:
        usage_error("give either a duration or a time", "--delay / --at")
    seconds = None if delay is None else parse_duration_s(delay, "--delay")
    at_ms = parse_time_option(at, "--at")
    moment = None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, UTC)
    try:
        with_delay_header(None, seconds, moment)
    except ValueError as error:
        usage_error(str(error).partition(": ")[2], "--delay / --at")
    return seconds, moment


class ProduceCommand(NamedTuple):
    """A run of `mansio produce`."""

    topic: str
    record_format: RecordFormat
    headers: Headers
    partition: int | None
    delay_s: float | None
    at: datetime | None
    priority: str | None
    report: ProduceProgress

    async def perform(self, bootstrap_servers: str, source: BinaryIO, options: dict[str, Any]) -> None:
        """Publish all records of `source` and wait for their acknowledgements. Raises the first error."""
        from mansio.client.producer.producer import ProducerOptions

        async with (
            connect(bootstrap_servers) as client,
            client.producer(ProducerOptions(**options)) as producer,
        ):
            with self.report.progress(source):
                pending: deque[Delivery] = deque()
                try:
                    await self._send_all(producer, source, pending)
                    await producer.flush()
                finally:
                    self._check_deliveries(pending)

    async def _send_all(self, producer: Producer, source: BinaryIO, pending: deque[Delivery]) -> None:
        from mansio.cli.records.produce import RecordSplitter, read_chunks

        splitter = RecordSplitter(self.record_format.delimiter)
        async for chunk in read_chunks(source.fileno()):
            await self._send(producer, splitter.feed(chunk), pending)
            self.report.read(len(chunk))
        await self._send(producer, splitter.end(), pending)

    async def _send(self, producer: Producer, records: list[bytes], pending: deque[Delivery]) -> None:
        from mansio.cli.records.produce import split_key_and_value

        for number, record_bytes in enumerate(records, self.report.sent + 1):
            key, value = split_key_and_value(record_bytes, self.record_format, number)
            pending.append(
                await producer.send(
                    self.topic,
                    value,
                    key=key,
                    headers=self.headers,
                    partition=self.partition,
                    delay=self.delay_s,
                    at=self.at,
                    priority=self.priority,
                )
            )
        self.report.sent += len(records)
        self._check_deliveries(pending)

    def _check_deliveries(self, pending: deque[Delivery]) -> None:
        """Count the acknowledged records at the head of `pending` and remove them. Raises the first failure, with the
        number of records acknowledged before it.
        """
        while pending and pending[0].done():
            try:
                self.report.stored(pending.popleft().result())
            except MansioError as error:
                raise type(error)(
                    f"{error.message} ({count_text(self.report.acknowledged, 'record')} acknowledged before it)"
                ) from error


class ProduceProgress:
    """Counts sent and acknowledged records, shows a progress bar, and prints one line per record if `output` is
    given.
    """

    def __init__(self, output: Output | None) -> None:
        self.sent = 0
        self.acknowledged = 0
        self._output = output
        self._bar: Progress | None = None

    @contextlib.contextmanager
    def progress(self, source: BinaryIO) -> Iterator[None]:
        """Context manager that shows a progress bar, if standard error is a terminal and the input is not."""
        if not sys.stderr.isatty() or source.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        status = os.fstat(source.fileno())
        total = status.st_size if stat.S_ISREG(status.st_mode) else None
        columns = (
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[acknowledged]:,} records acknowledged"),
        )
        with Progress(*columns, console=Console(stderr=True)) as self._bar:
            self._bar.add_task("", total=total, acknowledged=0)
            yield
            self._show()

    def read(self, count_bytes: int) -> None:
        if self._bar is not None:
            self._bar.advance(PROGRESS_TASK_ID, count_bytes)
            self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(PROGRESS_TASK_ID, acknowledged=self.acknowledged)

    def stored(self, metadata: RecordMetadata) -> None:
        self.acknowledged += 1
        if self._output is Output.JSON:
            print(json.dumps(metadata._asdict()))
        elif self._output is Output.TABLE:
            print(f"{metadata.topic}\t{metadata.partition}\t{metadata.offset}\t{metadata.timestamp_ms}")


# -- input --------


READ_CHUNK_BYTES = 256 * 1024
RECORD_BYTES_MAX = 64 * 1024 * 1024


class RecordFormat(NamedTuple):
    """How the input is converted to records. `delimiter`: ends a record; empty: the whole input is one record. `key`:
    key of every record. `key_separator`: separates key and value; None: records have no key of their own.
    `empty_is_null`: whether an empty value becomes null (a tombstone).
    """

    delimiter: bytes = b"\n"
    key: bytes | None = None
    key_separator: bytes | None = None
    empty_is_null: bool = False


class RecordSplitter:
    """Splits the chunks of an input into records at the delimiter."""

    def __init__(self, delimiter: bytes) -> None:
        self._delimiter = delimiter
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a chunk; returns the records that it completes."""
        delimiter = self._delimiter
        if not delimiter or (len(delimiter) == 1 and delimiter not in chunk):
            self._buffer(chunk)
            return []
        records = b"".join((*self._pending, chunk)).split(delimiter)
        self._pending, self._pending_bytes = [], 0
        self._buffer(records.pop())
        return records

    def end(self) -> list[bytes]:
        """Return the last record, which has no delimiter after it; an empty list if there is none."""
        pending = b"".join(self._pending)
        self._pending, self._pending_bytes = [], 0
        return [pending] if pending else []

    def _buffer(self, chunk: bytes) -> None:
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if self._pending_bytes > RECORD_BYTES_MAX:
            raise InvalidRecord(f"no delimiter within {RECORD_BYTES_MAX:,} bytes")


def split_key_and_value(
    record_bytes: bytes, record_format: RecordFormat, number: int
) -> tuple[bytes | None, bytes | None]:
    """Split a record into (key, value). `number`: number of the record, from 1, for the error of a missing
    separator.
    """
    key, value = record_format.key, record_bytes
    if record_format.key_separator is not None:
        key, separator, value = record_bytes.partition(record_format.key_separator)
        if not separator:
            raise InvalidRecord(
                f"record {number} has no key separator {record_format.key_separator!r}: {record_bytes[:40]!r}"
            )
    return key, (None if record_format.empty_is_null and not value else value)


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Read a file, pipe or terminal in chunks, until its end."""
    while True:
        await _wait_until_readable(descriptor)
        chunk = os.read(descriptor, READ_CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


async def _wait_until_readable(descriptor: int) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    try:
        loop.add_reader(descriptor, complete, ready, None)
    except (PermissionError, NotImplementedError):  # a regular file, which is always ready; or Windows
        await asyncio.sleep(0)
        return
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
