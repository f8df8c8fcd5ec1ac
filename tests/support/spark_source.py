"""For tests of the Spark source that need no JVM: topics filled as wanted, and readers asked as Spark asks them."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import mansio
from mansio.client.types import OutgoingRecord
from mansio.errors import UnsupportedMessageFormat
from mansio.spark.options import ERROR_COLUMN, SourceOptions, selected_columns
from mansio.spark.source.readers import BatchReader, StreamReader
from mansio.wire.batch.record_batch import HEADER_BYTES, encode_batch, iterate_batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.process import ServedBroker

Row = dict[str, Any]


class Topic:
    """A topic of one test."""

    def __init__(self, broker: ServedBroker, name: str, partitions: int = 1, **config: str) -> None:
        self.broker = broker
        self.bootstrap_servers = broker.bootstrap_servers
        self.name = name
        config.setdefault("retention_ms", "-1")  # records of these tests may be of any age
        settings = {key.replace("_", "."): value for key, value in config.items()}
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            client.admin.create_topic(name, partitions=partitions, config=settings)

    def fill(
        self,
        count: int,
        *,
        partition: int = 0,
        size: int = 10,
        first: int = 0,
        times: Sequence[int] | None = None,
        together: int = 1_000,
    ) -> None:
        """Publish `count` records, `together` at a time: values begin with their number."""
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            for begin in range(0, count, together):
                client.publish_many(
                    self.name,
                    [
                        OutgoingRecord(
                            b"%d " % (first + number) + b"." * size,
                            key=b"k%d" % number,
                            partition=partition,
                            timestamp_ms=None if times is None else times[number],
                        )
                        for number in range(begin, min(begin + together, count))
                    ],
                )

    def trim(self, before: int | Literal["end"] = "end") -> None:
        """Delete the records before an offset, in all partitions."""
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            client.admin.delete_records([self.name], before=before)

    def grow(self, partitions: int) -> None:
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            client.admin.create_partitions(self.name, partitions)

    def delete(self) -> None:
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            client.admin.delete_topic(self.name)

    def damage(self, marker: bytes, instead: bytes, *, seal: bool = False) -> None:
        """Change bytes of a record on the broker's disk, behind its back. `seal`: as if it had come so, CRC and all."""
        assert len(marker) == len(instead)
        for file in self.broker.data.rglob("*.log"):
            content = file.read_bytes()
            if marker in content:
                changed = content.replace(marker, instead)
                with (
                    file.open("r+b") as log,
                    suppress(UnsupportedMessageFormat),
                ):  # of the empty room behind them
                    for position, header in iterate_batches(content):
                        batch = changed[position : position + header.size]
                        log.write(encode_batch(header, batch[HEADER_BYTES:]) if seal else batch)
                return
        raise AssertionError(f"{marker!r} is in no log")

    def options(self, *, streaming: bool = False, **more: str) -> SourceOptions:
        return SourceOptions.parse(
            {"kafka.bootstrap.servers": self.bootstrap_servers, "subscribe": self.name, **more},
            streaming=streaming,
        )

    def rows(self, **more: Any) -> list[Row]:
        """What a batch read gives."""
        reader = BatchReader(self.options(**more), selected_columns(more))
        return read_all(reader, reader.partitions())

    def stream(self, **more: str) -> StreamReader:
        """A reader of a stream; from the beginning, unless set otherwise."""
        more.setdefault("startingOffsets", "earliest")
        return StreamReader(self.options(streaming=True, **more), selected_columns(more))


def read_all(reader: BatchReader | StreamReader, tasks: Sequence[Any]) -> list[Row]:
    """The rows of all tasks, read as in another process: from a copy of the reader."""
    copy: BatchReader | StreamReader = pickle.loads(pickle.dumps(reader))
    rows = []
    for task in pickle.loads(pickle.dumps(list(tasks))):
        for batch in copy.read(task):
            assert batch.num_rows
            rows += batch.to_pylist()
    return rows


def offsets_of(rows: Sequence[Row]) -> list[int]:
    return [row["offset"] for row in rows]


def numbers_of(rows: Sequence[Row]) -> list[int]:
    return [int(row["value"].split()[0]) for row in rows if not row.get(ERROR_COLUMN)]
