"""`mansio consume TOPIC --from-snapshot`: a look into a topic's archive, without Spark.

Reads the archive's files one batch at a time, so it begins at once and takes little memory, and is for looks, not for
work on all records: that is what pipelines are for.

Always true: records come partition by partition, in the order of offsets, printed exactly as `consume` prints those of
the topic; no broker is asked when deleted records are wanted too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mansio.cli.common import connect, refuse, run
from mansio.cli.lake_options import moment_option, open_archive, selection_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.cli.printing import Printer
    from mansio.client.types import Message
    from mansio.spark.lake.catalog import LakeTable
    from mansio.spark.lake.scan import Selection

NO_TIME_MS = -1
SMALL_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class SnapshotReading:
    """What to read of which archive. Times are milliseconds since the epoch, the end exclusive."""

    topic: str
    snapshot: str
    warehouse: str | None
    catalog: str | None
    include_deleted: bool
    partitions: tuple[int, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    limit: int | None = None

    def perform(self, broker: str, printer: Printer) -> None:
        """Print what there is, and end. Raises `LakeError`; without deleted records also what the broker answers."""
        if self.warehouse is None:
            refuse("say where the archive is", "--warehouse")
        table = open_archive(self.topic, self.warehouse, self.catalog)
        moment = moment_option(table, self.snapshot, "--from-snapshot")
        selection = moment.of(selection_option(list(self.partitions), self.from_ms, self.to_ms))
        if not self.include_deleted:
            selection = run(_still_there(broker, table, selection))
        left = self.limit
        for messages in _messages(table, selection, moment.snapshot_id, left):
            shown = messages if left is None else messages[:left]
            printer.show(shown)
            if left is not None:
                left -= len(shown)
                if left == 0:
                    return


async def _still_there(broker: str, table: LakeTable, selection: Selection) -> Selection:
    """The selection without what the topic has deleted. `UnknownTopicOrPartition`: it has deleted everything."""
    from mansio.client.types import TopicPartition
    from mansio.spark.lake.moments import is_archive_of

    async with connect(broker) as client:
        view = await client.admin.describe_topic(table.topic)
        if not is_archive_of(table, view.topic_id):
            return selection.above({})
        every = [TopicPartition(table.topic, partition.index) for partition in view.partitions]
        listed = await client.admin.list_offsets(every, "earliest")
    return selection.above({one.partition: entry.offset for one, entry in listed.items()})


def _messages(
    table: LakeTable, selection: Selection, snapshot_id: int | None, limit: int | None
) -> Iterator[list[Message]]:
    """Rows of the archive as the client hands records out."""
    from mansio.client.types import Message
    from mansio.spark.lake.scan import BATCH_ROWS, scan

    size = BATCH_ROWS if limit is None else max(1, min(limit, SMALL_BATCH_ROWS))
    if limit == 0:
        return
    for batch in scan(table, selection, snapshot_id=snapshot_id, batch_rows=size):
        columns = (
            batch.column(name).to_pylist() for name in ("__partition", "__offset", "key", "value", "headers")
        )
        yield [
            Message(table.topic, partition, offset, at, key, value, _headers(headers))
            for at, (partition, offset, key, value, headers) in zip(
                _times_ms(batch), zip(*columns, strict=True), strict=True
            )
        ]


def _times_ms(batch: Any) -> list[int]:
    times = batch.column("__timestamp").cast("int64").to_pylist()
    return [NO_TIME_MS if micros is None else micros // 1000 for micros in times]


def _headers(headers: list[dict[str, Any]] | None) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((one["key"], one["value"]) for one in headers or ())
