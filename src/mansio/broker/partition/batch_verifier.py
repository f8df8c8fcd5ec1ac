"""Verification of stored batches on another thread, for readers that would otherwise delay the event loop.

`Log.read` verifies small batches itself, for about a turn of the event loop. The batch verifier verifies larger
batches, damaged ranges, and what is left of a read and the batches that a sequential reader reads next, in slices of at
most `SLICE_BYTES` and `SLICE_BATCHES`, so that neither thread holds the interpreter lock for long. The segments for
which readers wait are checked in turn, one slice each.

Invariants:
* At most one check is running, and each segment has at most one request.
* A result is recorded only if the segment is still in the log as it was when the check began.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.errors import StorageError
from mansio.host.item_turns import ItemTurns
from mansio.storage.verification import check_batches
from mansio.tracebacks import copied

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.ports import Background, Scheduler
    from mansio.storage.log import Log
    from mansio.storage.segment import Segment
    from mansio.storage.verification import CheckResult

SLICE_BYTES: Final = 1 << 20
SLICE_BATCHES: Final = 512
READ_AHEAD_BYTES: Final = 4 << 20
"""Number of bytes after a reader's position that are verified in advance."""


class _Request:
    """Request to verify a segment from `offset` on.

    `is_searching`: the batch at `offset` is damaged, and the next slice searches the next intact batch.
    """

    __slots__ = ("bytes_left", "generation", "is_searching", "log", "offset", "on_checked")

    def __init__(self, log: Log, offset: int, on_checked: Callable[[], object]) -> None:
        self.log = log
        self.offset = offset
        self.on_checked = on_checked
        self.generation = log.generation
        self.bytes_left = READ_AHEAD_BYTES
        self.is_searching = False


class BatchVerifier:
    """Verifies batches for all partitions of a broker. All methods run on the event loop."""

    def __init__(self, background: Background, scheduler: Scheduler) -> None:
        self._background = background
        self._scheduler = scheduler
        self._turn = ItemTurns(scheduler, items_per_look=1)
        self._is_in_turn = False
        self._requests: dict[Segment, _Request] = {}
        self._running = False
        self.checked_bytes = 0
        """Number of bytes verified on the other thread."""

    def may_check(self) -> bool:
        """Whether a read may verify some batches itself. All reads of one turn of the event loop share its time."""
        if not self._is_in_turn:
            self._is_in_turn = True
            self._turn.begin()
            self._scheduler.call_soon(self._end_turn)
        return not self._turn.is_over()

    def _end_turn(self) -> None:
        self._is_in_turn = False

    def request(self, log: Log, on_checked: Callable[[], object], segment: Segment, offset: int) -> None:
        """Verify the batches of a segment from an offset on, for which readers wait; `on_checked` is called after each
        slice."""
        known = self._requests.get(segment)
        if known is not None and known.generation == log.generation:
            known.bytes_left = READ_AHEAD_BYTES
            checked = segment.checked
            if checked is not None and checked.find(offset) is None:
                known.offset = offset
            return
        self._requests[segment] = _Request(log, offset, on_checked)
        self._start()

    def _start(self) -> None:
        while self._requests and not self._running:
            segment = next(iter(self._requests))
            request = self._requests.pop(segment)
            if not self._is_current(segment, request) or not self._advance(segment, request):
                continue
            try:
                file, task = request.log.check_task(segment, request.offset, with_index=request.is_searching)
            except StorageError as error:
                self._record_failure(segment, request, error)
                continue
            work = partial(
                check_batches,
                file,
                task,
                bytes_max=SLICE_BYTES,
                batches_max=SLICE_BATCHES,
                delimit=request.is_searching,
            )
            self._requests[segment] = request
            self._running = True
            self._background.submit(work, partial(self._on_slice_done, segment, request))

    def _is_current(self, segment: Segment, request: _Request) -> bool:
        log = request.log
        return (
            not log.closed
            and log.generation == request.generation
            and not segment.replaced
            and segment.checked is not None
        )

    def _advance(self, segment: Segment, request: _Request) -> bool:
        """Move the request to the first offset that is not verified. Returns False if the request is complete."""
        checked = segment.checked
        assert checked is not None
        while (found := checked.find(request.offset)) is not None:
            request.offset = found.end_offset
        return request.offset < segment.end_offset and request.bytes_left > 0

    def _on_slice_done(
        self, segment: Segment, request: _Request, result: CheckResult | None, error: BaseException | None
    ) -> None:
        self._running = False
        self._requests.pop(segment, None)
        if self._is_current(segment, request):
            if result is None:
                if not isinstance(error, StorageError):
                    self._start()
                    raise copied(error) if error else AssertionError("a check has a result or an error")
                self._record_failure(segment, request, error)
            else:
                self._record_result(segment, request, result)
        self._start()

    def _record_failure(self, segment: Segment, request: _Request, error: StorageError) -> None:
        request.log.on_check_failed(segment, error)
        request.on_checked()

    def _record_result(self, segment: Segment, request: _Request, result: CheckResult) -> None:
        self.checked_bytes += result.read_bytes
        request.bytes_left -= max(result.read_bytes, 1)
        request.log.record_check(segment, result)
        was_searching, request.is_searching = (
            request.is_searching,
            bool(result.problem) and not request.is_searching,
        )
        if request.is_searching:
            request.bytes_left = max(request.bytes_left, 1)
        if not (was_searching and not result.ranges):  # otherwise there is no batch from there on
            self._requests[segment] = request
        request.on_checked()
