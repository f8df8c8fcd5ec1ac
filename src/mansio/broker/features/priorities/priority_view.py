"""Priorities of the records of one partition as a view of its log (`LogView`), on leaders and followers.

The leader reads the headers of a producer's batch once, when it checks them (`PriorityReader`).

Invariants:
* The index contains the log below `index.end` and nothing else; it is the same object as long as the view exists.
* On the leader of a partition the index reaches the end of the log, unless a part of it is being read after a start.
* Records that were stored before the topic got the setting have normal priority. A replica without a snapshot does not
  know since when the topic has the setting, and goes by the headers of all records.
* The records of a damaged batch have normal priority, also after a repair, until the index is built again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.broker.features.priorities.priority_index import PriorityIndex
from mansio.broker.log_view.view import DecodedBatch, LogView
from mansio.broker.partition.append import AppendFeature
from mansio.broker.partition.append_validation import RecordReader
from mansio.errors import CorruptLog
from mansio.state.share_partition.offset_numbers import NumberedRange
from mansio.storage.checksummed_file import decode_checksummed, encode_checksummed
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.priority_header import PRIORITY_NAME, read_priorities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.broker.partition.append import Draft, Finish
    from mansio.ports import Buffer
    from mansio.storage.log import Log
    from mansio.wire.batch.priority_header import PriorityRun
    from mansio.wire.batch.record_batch import BatchHeader

_MAGIC: Final = b"MPRIOR\0\n"
_VERSION: Final = 1


class PriorityView(LogView["Sequence[PriorityRun]"]):
    """The priorities of a partition's records."""

    __slots__ = ("_is_new", "_log", "_on_complete", "_start_offset", "index")

    kind = "priorities"
    suffix = ".priority"
    outlives_log_start = True
    reads_records = True
    damage_retries = 0

    def __init__(self, log: Log, *, is_new: bool, on_complete: Callable[[], None]) -> None:
        """`is_new`: the topic gets the setting now, so all records in the log have normal priority. `on_complete` is
        called when the index has reached the end of the log after a part of it was read."""
        self._log = log
        self._is_new = is_new
        self._on_complete = on_complete
        self._start_offset = log.start_offset
        """The start of the log before its last change: the index is kept from here on, because share partitions count
        the records that were deleted."""
        self.index = PriorityIndex(log.start_offset)

    @property
    def is_complete(self) -> bool:
        """Whether the index reaches the end of the log."""
        return self.index.end >= self._log.end_offset

    # Application of the log

    def decode(self, batch: bytes) -> DecodedBatch:
        return DecodedBatch(self.read(batch))

    def read(self, batch: Buffer) -> Sequence[PriorityRun]:
        """Return the priorities of a batch; records whose headers are invalid have normal priority."""
        inspected = InspectedBatch(batch, (PRIORITY_NAME,))
        return read_priorities(inspected, self._log.directory, strict=False)

    def apply(self, header: BatchHeader, base_offset: int, content: Sequence[PriorityRun] | None) -> None:
        self.index.append(
            base_offset + header.last_offset_delta + 1,
            [
                NumberedRange(base_offset + first, base_offset + last, priority)
                for first, last, priority in content or ()
            ],
        )

    def skip_to(self, offset: int) -> None:
        self.index.append(offset)

    def truncate(self, end_offset: int, start_offset: int) -> bool:
        self.index.truncate(end_offset)
        self.index.drop_below(start_offset)
        self._start_offset = start_offset
        return True

    @property
    def keeps_log(self) -> bool:
        return False

    def on_trim(self, start_offset: int) -> None:
        self.index.drop_below(self._start_offset)
        self._start_offset = start_offset

    def on_complete(self) -> None:
        self._on_complete()

    # Snapshots

    def begin(self) -> tuple[int, bool]:
        if self._is_new:
            self.index.append(self._log.end_offset)
        return self.index.end, self._is_new

    def freeze(self, end_offset: int) -> PriorityIndex:
        del end_offset
        return self.index.freeze()

    def encode_snapshot(self, end_offset: int, state: PriorityIndex) -> bytes:
        del end_offset
        return encode_checksummed(_MAGIC, _VERSION, state.to_bytes())

    def decode_snapshot(self, data: bytes) -> tuple[int, PriorityIndex]:
        payload = decode_checksummed(_MAGIC, _VERSION, data)
        if payload is None:
            raise CorruptLog("snapshot of priorities: damaged")
        index = PriorityIndex.from_bytes(payload)
        return index.end, index

    def restore(self, state: PriorityIndex) -> None:
        self.index = state
        state.drop_below(self._log.start_offset)


def _read(inspected: InspectedBatch, name: str, now_ms: int) -> Sequence[PriorityRun]:
    del now_ms
    return read_priorities(inspected, name, strict=True)


PRIORITY_READER: Final = RecordReader((PRIORITY_NAME,), _read)
"""It finds the records whose priority is not normal."""


class PriorityReader(AppendFeature):
    """`AppendFeature` that gives the view the priorities of clients' batches."""

    __slots__ = ("_view",)

    def __init__(self, view: PriorityView) -> None:
        self._view = view

    def prepare(self, draft: Draft) -> Finish:
        del draft
        return self._add_content

    def _add_content(self, draft: Draft) -> None:
        if draft.batch is None or draft.header.is_control:
            return
        is_read = PRIORITY_READER in draft.inspected.rules.readers
        draft.contents[self._view] = (
            draft.found.get(PRIORITY_READER, ()) if is_read else self._view.read(draft.batch)
        )
