"""Open files of the active segments of all logs: their bound, and the queue of those who wait for one.

A log with nothing to flush can close the file of its active segment; its next append opens the file again. If that
would be a file too many, and no other log can close one, the append is refused (`ActiveFilesInUse`). A flush needs free
descriptors itself, for the leader epochs and the directory of a log: if files with unflushed bytes took them all, none
of them could ever be closed.

Whoever is refused can wait (`ActiveFiles.wait`). While anyone waits, the logs whose files have been open longest, one
for each who waits, are asked to give them up: they refuse further appends of clients, so that a flush leaves nothing to
be flushed. Otherwise a log that is written to during each flush would keep its file for ever.

Invariants:
* At most `files_max` files are open of active segments, and of closed segments that are not flushed yet. What cannot
  wait in the queue may open some more: an eighth for followers and for records that the broker adds to a client's
  topic, a quarter for logs of internal topics. So the broker's own records do not wait for those of clients.
* A file with unflushed bytes is never closed: an error of its writeback could be lost. The exception is that of a log
  that has failed, which nothing is ever appended to again.
* Those who wait are served in their order, and before others that need a file.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from mansio.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    CallAfterJob = Callable[[Callable[[], None]], bool]

ACTIVE_FILES_MAX: Final = 1 << 20
ACTIVE_FILES_MIN: Final = 2
"""The files of the old and the new active segment are open while a log rolls."""

EXAMINED_LOGS_MAX: Final = 64
"""Maximum number of logs that are examined for one that was not written to lately, when the file of an active segment
is opened."""

INTERNAL_FILES_DIVISOR: Final = 4
"""Logs of internal topics may open this part of `files_max` in addition. These logs are few, so that the reserve of
descriptors is sufficient for their files."""

RESERVE_DIVISOR: Final = 8
"""Followers, and the broker's own records in topics of clients, may open this part of `files_max` in addition."""

SERVED_PER_FLUSH_MAX: Final = 256
"""Maximum number of those who wait that are called in one turn of the event loop."""


class ActiveFilesInUse(StorageError):
    """Raised when another file of an active segment may be opened only after a flush of others. Nothing was written."""


class ActiveLog(Protocol):
    """A log, as far as its active segment's file is concerned."""

    end_offset: int

    def close_active_file(self) -> bool:
        """Close the file of the active segment, unless it is in use or has unflushed bytes. Returns whether it did."""

    def give_up_active_file(self) -> None:
        """Refuse appends that can wait, until the file was closed or the queue is empty."""


class ActiveFiles:
    """Open files of the active segments of a broker's logs, and the queue of those who wait for one. All methods run on
    the event loop."""

    def __init__(self, files_max: int = ACTIVE_FILES_MAX) -> None:
        self.files_max = max(files_max, ACTIVE_FILES_MIN)
        self._internal_reserve = max(self.files_max // INTERNAL_FILES_DIVISOR, 2)
        self._reserve = max(self.files_max // RESERVE_DIVISOR, 1)
        self._open: OrderedDict[ActiveLog, int] = OrderedDict()
        """Logs whose active segment has an open file, least recently examined first, with their end offset then."""
        self._kept: OrderedDict[ActiveLog, None] = OrderedDict()
        """Those of them that can be asked to give up their file, longest open first."""
        self._asked: set[ActiveLog] = set()
        """Those of them that were asked to give up their file."""
        self._unflushed_closed: dict[ActiveLog, int] = {}
        """Number of files of closed segments that are not flushed yet, of each log that has any."""
        self._unflushed_closed_count = 0
        self._waiting: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._called: Hashable | None = None
        """The one of those who wait that is being called."""
        self._is_serving = False
        self._is_call_due = False
        """Whether those who wait are called after the next job."""

    @property
    def open_files(self) -> int:
        """Number of open files of active segments, and of closed ones that are not flushed."""
        return len(self._open) + self._unflushed_closed_count

    @property
    def has_waiting(self) -> bool:
        """Whether a file that becomes free belongs to others than the caller: not while those are called who wait."""
        return bool(self._waiting) and not self._is_serving

    def make_room(self, log: ActiveLog, *, is_internal: bool = False, uses_reserve: bool = False) -> None:
        """Make room for another file of an active segment of `log`; other logs close theirs if these are too many.

        `is_internal`: the log belongs to an internal topic. `uses_reserve`: the caller cannot `wait`. Raises
        `ActiveFilesInUse`.
        """
        files_max = self.files_max
        if is_internal:
            files_max += self._internal_reserve
        elif uses_reserve:
            files_max += self._reserve
        elif self.has_waiting:
            raise ActiveFilesInUse("others wait for the files of active segments")
        if self.open_files < files_max:
            return
        self._close(files_max - 1, keep=log)
        if self.open_files < files_max:
            return
        raise ActiveFilesInUse(
            f"{self.open_files} segment files have unflushed records, and no more may be open"
        )

    def close_some(self, count: int, *, keep: ActiveLog) -> None:
        """Close up to `count` files of other logs than `keep`, because no descriptor is free."""
        self._close(self.open_files - count, keep=keep)

    def record_open(self, log: ActiveLog, *, is_internal: bool = False) -> None:
        """Record that the file of a log's active segment is open. `is_internal`: see `make_room`."""
        self._open[log] = log.end_offset
        if not is_internal and log not in self._asked:
            self._kept[log] = None

    def record_opened_log(self, log: ActiveLog, *, is_internal: bool = False) -> None:
        """Record that the file of a log's active segment was opened without `make_room`, when the log was opened,
        truncated or reset, and that it has nothing to flush; it is closed if no other one can be."""
        self.record_open(log, is_internal=is_internal)
        if self.open_files > self.files_max:
            self._close(self.files_max, keep=log)
            if self.open_files > self.files_max and log.close_active_file():
                self._forget(log)

    def record_unflushed_closed(self, log: ActiveLog, count: int) -> None:
        """Record how many files of closed segments that are not flushed yet a log has open."""
        self._unflushed_closed_count += count - self._unflushed_closed.pop(log, 0)
        if count:
            self._unflushed_closed[log] = count

    def record_closed_log(self, log: ActiveLog) -> None:
        """Record that a log was closed."""
        self._forget(log)
        self.record_unflushed_closed(log, 0)

    def record_kept(self, log: ActiveLog) -> None:
        """Record that a log that was asked to give up its file keeps it, because the queue is empty."""
        self._asked.discard(log)
        self._kept[log] = None

    def wait(self, waiter: Hashable, attempt: Callable[[], object], call_after_job: CallAfterJob) -> bool:
        """Call `attempt` once after the next flush, which starts now, and after those that have waited longer.

        It calls `wait` again if it is refused again, and keeps its place. `waiter`: identifies it; another call for the
        same `waiter` has no effect. `call_after_job`: that of `GroupCommit`. Returns False if nothing is to be flushed,
        so that waiting is useless.
        """
        if not self._is_call_due:
            if not call_after_job(partial(self._call_waiting, call_after_job)):
                return False
            self._is_call_due = True
        is_called = self._is_serving and waiter == self._called
        if waiter not in self._waiting:
            self._waiting[waiter] = attempt
        if is_called:
            self._waiting.move_to_end(waiter, last=False)
        wanted = max(len(self._waiting) - len(self._asked), int(is_called))
        while wanted > 0 and self._kept:
            log, _ = self._kept.popitem(last=False)
            self._asked.add(log)
            log.give_up_active_file()
            wanted -= 1
        return True

    def _call_waiting(self, call_after_job: CallAfterJob) -> None:
        """Call those who wait, until one has to wait again."""
        waiting = self._waiting
        self._is_call_due = False
        self._is_serving = True
        called = 0
        try:
            while waiting and not self._is_call_due:
                if called == SERVED_PER_FLUSH_MAX:
                    self._is_call_due = call_after_job(partial(self._call_waiting, call_after_job))
                    called = 0
                    continue
                self._called, attempt = waiting.popitem(last=False)
                called += 1
                attempt()
        finally:
            self._called, self._is_serving = None, False
            if waiting and not self._is_call_due:  # after an exception
                self._is_call_due = call_after_job(partial(self._call_waiting, call_after_job))
                if not self._is_call_due:
                    self._call_waiting(call_after_job)

    def _forget(self, log: ActiveLog) -> None:
        self._open.pop(log, None)
        self._kept.pop(log, None)
        self._asked.discard(log)

    def _close(self, files_max: int, *, keep: ActiveLog) -> None:
        """Close files of other logs than `keep` until `files_max` are open: of some that were not written to since they
        were last examined, then of any."""
        for examined_max, spares_written in (EXAMINED_LOGS_MAX, True), (len(self._open), False):
            for _ in range(min(len(self._open), examined_max)):
                if self.open_files <= files_max:
                    return
                log, end_offset = self._open.popitem(last=False)
                is_kept = log is keep or (spares_written and log.end_offset != end_offset)
                if is_kept or not log.close_active_file():
                    self._open[log] = log.end_offset
                else:
                    self._forget(log)
