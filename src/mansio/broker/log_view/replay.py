"""Replay of a partition's log into a view, on leaders and followers (`PartitionHook`).

What the leader appends is applied as it is appended, with the content that it has decoded. Everything else is read from
the log, in slices, until the view has reached the end of the log. Snapshots shorten the next start.

    log start ---- applied (in the view) ---- applied_end ---- read by the next slices ---- log end

Invariants:
* The view contains the log below `applied_end` and nothing else; a part of the log that was truncated is not in it.
* Each batch is applied once, in the order of the log. A damaged batch is reported, read again, because it may be
  repaired from a replica, and finally left out.
* Retention keeps what the view needs, and everything that is not applied yet, if the view requires that (`keeps_log`).
"""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from mansio.broker.log_view.snapshots import ViewSnapshots
from mansio.broker.log_view.view import LogView
from mansio.errors import UNREADABLE_OR_DAMAGED, CorruptLog, MansioError
from mansio.host.item_turns import ItemTurns, Work
from mansio.logs import fields
from mansio.wire.batch.record_batch import check_stored_batch, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mansio.ports import Background, Disk, Scheduler
    from mansio.storage.log import Log
    from mansio.wire.batch.record_batch import BatchHeader

logger = logging.getLogger(__name__)

SLICE_BATCHES: Final = 200
"""Maximum number of batches in one turn of the event loop."""

READ_RETRY_MS: Final = 10_000
"""Time after which a part of the log that could not be read is read again."""

View = TypeVar("View", bound=LogView[Any])


class ViewReplay(Generic[View]):
    """`PartitionHook` that keeps a view equal to its log. All methods run on the broker's event loop."""

    __slots__ = (
        "_closed",
        "_failures",
        "_is_leader",
        "_is_reading",
        "_log",
        "_on_damage",
        "_retained_until",
        "_scheduler",
        "applied_end",
        "snapshots",
        "view",
    )

    def __init__(
        self,
        view: View,
        disk: Disk,
        background: Background,
        scheduler: Scheduler,
        log: Log,
        *,
        is_leader: Callable[[], bool],
        on_damage: Callable[[int, MansioError], None],
    ) -> None:
        """`is_leader` returns whether this broker leads the partition. `on_damage` is called with the offset of a batch
        that cannot be read. Raises `OSError`."""
        self.view = view
        self._scheduler = scheduler
        self._log = log
        self._is_leader = is_leader
        self._on_damage = on_damage
        self._closed = False
        self._is_reading = False
        self._failures = 0
        self._retained_until: tuple[int, int] | None = None
        """See `retain`."""
        self.snapshots = ViewSnapshots(disk, background, log, type(view))
        self.applied_end = 0
        self._load()

    @property
    def is_complete(self) -> bool:
        """Whether the view contains the whole log."""
        return self.applied_end >= self._log.end_offset and not self._is_reading

    @property
    def is_retaining(self) -> bool:
        """Whether retention keeps what was copied, because the copies are not committed."""
        return self._retained_until is not None

    def retain(self, end_offset: int, floor: int) -> None:
        """Keep everything from `floor` on until the log is committed up to `end_offset`, where copies of it end."""
        self._retained_until = (end_offset, floor)

    # Hook methods

    def before_append(self, header: BatchHeader) -> None:  # noqa: ARG002 - the hook's signature
        return None

    def on_append(
        self, header: BatchHeader, base_offset: int, contents: Mapping[object, Any] | None = None
    ) -> None:
        """Apply a batch that was appended. `contents`: its decoded content for each view. A leader passes that of every
        view that the batch concerns; None if it was not decoded."""
        if self._is_reading or base_offset < self.applied_end:
            return
        content = None if contents is None else contents.get(self.view)
        is_known = content is not None or (contents is not None and self._is_leader())
        if base_offset != self.applied_end:
            self._read_on()
        elif is_known or header.is_control is self.view.reads_records:
            self._apply(header, base_offset, content)
        else:
            self._read_on()

    def on_committed(self, high_watermark: int) -> None:
        if self._retained_until is not None and self._retained_until[0] <= high_watermark:
            self._retained_until = None
        self.snapshots.on_committed(self.view, high_watermark)

    def on_trim(self, start_offset: int) -> None:
        """Go on at the new start of the log: what the view needs from below it was copied to a later part."""
        self.view.on_trim(start_offset)
        if self.applied_end < start_offset:
            self._skip_to(start_offset)

    def on_truncate(self, end_offset: int) -> None:
        """Remove what was applied from `end_offset` on, or load the view again from a snapshot and the log."""
        log = self._log
        self.snapshots.truncate(end_offset)
        self._retained_until = None
        if self.view.truncate(end_offset, log.start_offset):
            self.applied_end = max(min(self.applied_end, end_offset), log.start_offset)
        else:
            self._load()

    def readable_end(self, isolation_level: int) -> int | None:  # noqa: ARG002 - the hook's signature
        return None

    def retention_floor(self) -> int | None:
        if not self.view.keeps_log:
            return None
        floors = [] if self.is_complete else [self.applied_end]
        if (location := self.view.lowest_location()) is not None:
            floors.append(location)
        if self._retained_until is not None:
            floors.append(self._retained_until[1])
        return min(floors, default=None)

    def close(self, *, save: bool) -> None:
        self._closed = True
        if save and self.view.is_whole:
            self.snapshots.save_last(self.view, self.applied_end)

    # Application of the log

    def _apply(self, header: BatchHeader, base_offset: int, content: Any) -> None:
        snapshots = self.snapshots
        self.applied_end = base_offset + header.last_offset_delta + 1
        snapshots.unsaved_bytes += header.batch_length
        self.view.apply(header, base_offset, content)
        if snapshots.is_due and self.view.is_whole:
            snapshots.prepare(self.view, self.applied_end)

    def _skip_to(self, offset: int) -> None:
        self.applied_end = offset
        self.view.skip_to(offset)

    def _read_on(self) -> None:
        """Apply the log from `applied_end` on in slices, on a leader starting now: it has appended one batch. A
        follower appends many at once."""
        self._is_reading = True
        if self._is_leader():
            self._read_slice()
        else:
            self._scheduler.call_soon(self._read_slice)

    def _read_slice(self) -> None:
        log, view = self._log, self.view
        if self._closed or not self._is_reading:
            return
        turn = ItemTurns(self._scheduler, Work.VIEW_REPLAY)
        try:
            for header, batch in islice(self._stored_batches(), SLICE_BATCHES):
                base_offset = header.base_offset
                if base_offset > self.applied_end >= log.compaction.state.sparse_end_offset:
                    raise CorruptLog(f"{log.directory}: offset {self.applied_end} cannot be read")
                content, items = None, 1
                if batch is not None:
                    check_stored_batch(batch)
                    content, count = view.decode(batch)
                    items += count
                self._apply(header, base_offset, content)
                self._failures = 0
                if turn.is_over(items):
                    break
            turn.end()
        except (MansioError, OSError) as error:
            if not self._leave_out(error):
                self._scheduler.call_later(READ_RETRY_MS, self._read_slice)
                return
        if self.applied_end < log.end_offset:
            self._scheduler.call_soon(self._read_slice)
            return
        self._is_reading = False
        view.on_complete()

    def _stored_batches(self) -> Iterator[tuple[BatchHeader, bytes | None]]:
        """Yield the batches that are not applied: headers, and the bytes of those that the view needs."""
        if not self.view.reads_records:
            return self._log.headers_with_control_batches(self.applied_end)
        headers = ((read_header(batch), batch) for batch in self._log.batches(self.applied_end))
        return ((header, None if header.is_control else batch) for header, batch in headers)

    def _leave_out(self, error: MansioError | OSError) -> bool:
        """Report a batch that cannot be read. Return True if it was damaged and read often enough: then it is left out
        of the view."""
        log, view = self._log, self.view
        known = fields(view=view.kind, directory=log.directory, offset=self.applied_end, reason=error)
        logger.error("view_not_read", extra=known)
        if isinstance(error, MansioError):
            self._on_damage(self.applied_end, error)
        self._failures += 1
        is_damage = isinstance(error, (CorruptLog, *UNREADABLE_OR_DAMAGED))
        if self._failures <= view.damage_retries or not is_damage:
            return False
        self._failures = 0
        try:
            found = next(log.batch_headers(self.applied_end), None)
        except (MansioError, OSError):  # damage in the active segment hides what follows
            return False
        if found is None:
            self._skip_to(log.end_offset)
        else:  # an intact batch after the damage, or the damaged one
            is_after = found.base_offset > self.applied_end
            self._skip_to(found.base_offset if is_after else found.last_offset + 1)
        return True

    # Snapshots

    def _load(self) -> None:
        log = self._log
        end_offset = self.snapshots.load(self.view)
        if end_offset is None:
            end_offset, is_stored = self.view.begin()
            if is_stored:
                self.snapshots.save(self.view, end_offset, self.view.freeze(end_offset), durable=True)
        self.applied_end = max(end_offset, log.start_offset)
        self._is_reading = self.applied_end < log.end_offset
        if self._is_reading:
            self._scheduler.call_soon(self._read_slice)
