"""Callers that wait for one partition (Kafka's delayed operations, which it keeps in purgatories).

    a wait for      is completed when                                       ends early when
    a commit        the high watermark reaches its end offset               the log fails, the role changes, too few
                                                                            replicas are in sync, or the session of the
                                                                            broker may have expired
    a flush         this broker has flushed the log up to its end offset    the log fails or the role changes
    a start offset  each in-sync replica has flushed that log start offset  the role changes

A parked reader or follower is woken whenever it may read more, until it is unparked. A mark is called once, when the
fetch session of a follower that has all records has something for its next request. The partition decides what has
happened and makes the errors; this object has those that wait for it.

Invariants:
* A wait is completed exactly once, even if its callback begins or ends other waits. Callbacks must not raise.
* Waits for commits are completed in the order of their end offsets; of equal ones, the older one first.
* Nothing is kept of a wait that is completed, nor of a reader or follower that is unparked. A wait for a start offset
  that has timed out, so that its promise is done, is removed with the next change of these waits.

Callers bound the waits: a request has one for each of its batches, and is parked once at each of its partitions. A wait
for a commit outlives the timeout of its request, at the latest until the in-sync set shrinks, which ends it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from mansio.ports import complete, complete_with_error
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.errors import MansioError
    from mansio.ports import Promise

_UNKNOWN_OFFSET: Final = -1
_by_offset = itemgetter(0)


class PartitionWaits:
    """The waits of one partition, its parked readers with their isolation levels, and its parked followers.

    Other objects only count the public collections, or test whether they are empty."""

    __slots__ = ("_stable_end", "commits", "flushes", "followers", "marks", "readers", "start_offsets")

    def __init__(self) -> None:
        self.commits: deque[tuple[int, Callable[[MansioError | None], None]]] = deque()
        self.flushes: list[tuple[int, Callable[[], None]]] = []
        self.start_offsets: list[tuple[int, Promise[int]]] = []
        self.readers: dict[Callable[[], None], int] = {}
        self.followers: dict[Callable[[], None], None] = {}
        self.marks: dict[Callable[[], None], None] = {}
        self._stable_end = _UNKNOWN_OFFSET  # the last stable offset when the readers were woken

    # Commits

    def add_commit(self, end_offset: int, callback: Callable[[MansioError | None], None]) -> None:
        """Call `callback` once: with None when all records below `end_offset` are committed, or with an error."""
        commits = self.commits
        if commits and commits[-1][0] > end_offset:  # a duplicate of an older batch that is still in flight
            insort(commits, (end_offset, callback), key=_by_offset)
        else:
            commits.append((end_offset, callback))

    def on_committed(self, high_watermark: int, stable_end: int) -> None:
        """Complete the waits for commits up to the high watermark, which has advanced, and wake the readers.

        `stable_end`: the last stable offset. While it stays below the high watermark, because of an open transaction,
        readers of committed records are not woken."""
        while (commits := self.commits) and commits[0][0] <= high_watermark:  # one that it calls may end all
            commits.popleft()[1](None)
        if stable_end == high_watermark or stable_end != self._stable_end:
            self._stable_end = stable_end
            for wake in tuple(self.readers):
                wake()
        else:
            for wake, isolation_level in tuple(self.readers.items()):
                if not isolation_level:
                    wake()

    def fail_commits(self, error: MansioError) -> None:
        """End all waits for commits with an error."""
        commits, self.commits = self.commits, deque()
        for _, callback in commits:
            callback(error)

    # Flushes

    def add_flush(self, end_offset: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, when all records below `end_offset` are flushed on this broker, or never will be."""
        self.flushes.append((end_offset, callback))

    def on_flushed(self, end_offset: int) -> None:
        """Complete the waits for the flush of the records below `end_offset`."""
        flushes = self.flushes
        self.flushes = [wait for wait in flushes if wait[0] > end_offset]
        for wanted, callback in flushes:
            if wanted <= end_offset:
                callback()

    # Log start offsets

    def add_start_offset(self, start_offset: int, promise: Promise[int]) -> None:
        """Complete `promise` when every in-sync replica has flushed a log start offset, unless it is done before."""
        self.start_offsets.append((start_offset, promise))

    def on_start_offset_flushed(self, is_flushed: Callable[[int], bool], start_offset: int) -> None:
        """Complete the waits for the log start offsets for which `is_flushed` is true, with the current one."""
        waits, self.start_offsets = self.start_offsets, []
        done: list[Promise[int]] = []
        for wait in waits:
            if is_flushed(wait[0]):
                done.append(wait[1])
            elif not wait[1].done():
                self.start_offsets.append(wait)
        for promise in done:
            complete(promise, start_offset)

    # Parked readers and followers

    def park(self, wake: Callable[[], None], isolation_level: int) -> None:
        """Call `wake` whenever more records may be readable for this isolation level, until `unpark(wake)`."""
        self.readers[wake] = isolation_level

    def unpark(self, wake: Callable[[], None]) -> None:
        if wake in self.readers:
            del self.readers[wake]

    def park_follower(self, wake: Callable[[], None]) -> None:
        """Call `wake` after each append, when the log start offset changes and when this broker stops leading, until
        `unpark_follower(wake)`."""
        self.followers[wake] = None

    def unpark_follower(self, wake: Callable[[], None]) -> None:
        if wake in self.followers:
            del self.followers[wake]

    def wake_followers(self) -> None:
        for wake in tuple(self.followers):
            wake()

    def add_mark(self, mark: Callable[[], None]) -> None:
        """Call `mark` once, when a follower has something to learn or to report that can wait for its next request."""
        self.marks[mark] = None

    def remove_mark(self, mark: Callable[[], None]) -> None:
        self.marks.pop(mark, None)

    def mark_followers(self) -> None:
        marks, self.marks = self.marks, {}
        for mark in marks:
            mark()

    def wake_all(self) -> None:
        """Wake all readers and followers."""
        for wake in (*self.readers, *self.followers):
            wake()

    # End of waits

    def fail(self, error: MansioError) -> None:
        """End the waits for commits, with an error, and for flushes, and wake all, because the log has failed. Waits
        for log start offsets go on: theirs are on this broker's disk."""
        self.fail_commits(error)
        flushes, self.flushes = self.flushes, []
        for _, callback in flushes:
            callback()
        self.wake_all()

    def end(self, error: MansioError) -> None:
        """End all waits, because the leader epoch in which they began has ended, and wake all."""
        self._stable_end = _UNKNOWN_OFFSET
        start_offsets, self.start_offsets = self.start_offsets, []
        for _, promise in start_offsets:
            complete_with_error(promise, copied(error))
        self.fail(error)

    def close(self, error: MansioError) -> None:
        """End all waits, wake all and unpark them."""
        self.end(error)
        self.readers.clear()
        self.followers.clear()
        self.marks.clear()
