"""`mansio consume TOPIC --from-snapshot`: prints a topic's archive, without Spark.

The archive's files are read one batch at a time, so the command starts immediately and needs little memory. It is for
inspection; to process all records, use a pipeline.

Invariants:
* Records are printed by partition, in offset order, in the same format as those of the topic.
* With `--include-deleted` the command sends no request to a broker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mansio.cli.support.archive_options import open_archive, parse_version_option, select_records
from mansio.cli.support.common import connect, run, usage_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.cli.support.formatting import RecordPrinter
    from mansio.client.types import Message
    from mansio.iceberg.archive.table import ArchiveTable
    from mansio.iceberg.archive.table_scan import Selection

NO_TIMESTAMP_MS = -1
LIMITED_BATCH_ROWS_MAX = 1024


@dataclass(frozen=True, slots=True)
class SnapshotConsumeCommand:
    """A run of `mansio consume --from-snapshot`. Records are selected by timestamp in [`from_ms`, `to_ms`), in
    milliseconds since the epoch.
    """

    topic: str
    snapshot: str
    warehouse: str | None
    catalog: str | None
    include_deleted: bool
    partitions: tuple[int, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    limit: int | None = None

    def perform(self, bootstrap_servers: str, printer: RecordPrinter) -> None:
        """Print the selected records. Raises `ArchiveError`; without `include_deleted` also errors of the brokers."""
        if self.warehouse is None:
            usage_error("required with --from-snapshot", "--warehouse")
        table = open_archive(self.topic, self.warehouse, self.catalog)
        version = parse_version_option(table, self.snapshot, "--from-snapshot")
        selection = version.limit_selection(select_records(list(self.partitions), self.from_ms, self.to_ms))
        if not self.include_deleted:
            selection = run(_exclude_deleted_records(bootstrap_servers, table, selection))
        remaining = self.limit
        for messages in _messages(table, selection, version.snapshot_id, remaining):
            shown = messages if remaining is None else messages[:remaining]
            printer.show(shown)
            if remaining is not None:
                remaining -= len(shown)
                if remaining == 0:
                    return


async def _exclude_deleted_records(
    bootstrap_servers: str, table: ArchiveTable, selection: Selection
) -> Selection:
    """Return the selection without records that the topic has deleted. Raises `UnknownTopicOrPartition` if it does not
    exist.
    """
    from mansio.client.types import TopicPartition
    from mansio.iceberg.archive.time_travel import is_archive_of

    async with connect(bootstrap_servers) as client:
        view = await client.admin.describe_topic(table.topic)
        if not is_archive_of(table, view.topic_id):
            return selection.starting_at({})
        partitions = [TopicPartition(table.topic, partition.index) for partition in view.partitions]
        listed = await client.admin.list_offsets(partitions, "earliest")
    return selection.starting_at({one.partition: entry.offset for one, entry in listed.items()})


def _messages(
    table: ArchiveTable, selection: Selection, snapshot_id: int | None, limit: int | None
) -> Iterator[list[Message]]:
    """Read the selected records as messages of the client, in batches."""
    from mansio.client.types import Message
    from mansio.iceberg.archive.table_scan import BATCH_ROWS, scan

    size = BATCH_ROWS if limit is None else max(1, min(limit, LIMITED_BATCH_ROWS_MAX))
    if limit == 0:
        return
    for batch in scan(table, selection, snapshot_id=snapshot_id, batch_rows=size):
        columns = (
            batch.column(name).to_pylist() for name in ("__partition", "__offset", "key", "value", "headers")
        )
        yield [
            Message(table.topic, partition, offset, at, key, value, _headers(headers))
            for at, (partition, offset, key, value, headers) in zip(
                _timestamps_ms(batch), zip(*columns, strict=True), strict=True
            )
        ]


def _timestamps_ms(batch: Any) -> list[int]:
    times = batch.column("__timestamp").cast("int64").to_pylist()
    return [NO_TIMESTAMP_MS if micros is None else micros // 1000 for micros in times]


def _headers(headers: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((one["key"], one["value"]) for one in headers or ())
