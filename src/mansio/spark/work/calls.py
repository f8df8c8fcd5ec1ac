"""Which calls of a function are made for the rows of a batch, and which of them are repeated because their process
died. Does no I/O.

Invariants:
* Each row has one outcome. A row is in one call, unless a call of several rows ended its process: then these rows are
  called again in halves, until the row that does it is alone.
* A process makes a bounded number of calls, and each process that dies makes at least one call shorter, so the number
  of processes for `n` rows in calls of `k` is at most about `2 n`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")


class Call(NamedTuple):
    """A call with the rows `first` to below `end` of a batch."""

    first: int
    end: int

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.end - self.first


class Died(NamedTuple):
    """How the process of a call ended before the call was complete."""

    message: str
    timed_out: bool = False


class CallOutcome(NamedTuple, Generic[T]):
    """A call that is complete, with what it has returned, or a call of one row whose process died."""

    call: Call
    result: T | None
    died: Died | None = None


def calls_of(rows: int, rows_per_call: int) -> list[Call]:
    """Divide the rows of a batch into calls."""
    return [Call(first, min(first + rows_per_call, rows)) for first in range(0, rows, rows_per_call)]


def run_isolated(
    calls: Sequence[Call], run: Callable[[Sequence[Call]], tuple[list[T], Died | None]]
) -> Iterator[CallOutcome[T]]:
    """Yield the outcomes of calls in order. `run` makes calls in a new process; it returns the results of those that
    are complete, from the first one on, and how the process ended, None if all are complete."""
    waiting = list(calls)
    while waiting:
        results, died = run(waiting)
        for call, result in zip(waiting, results, strict=False):
            yield CallOutcome(call, result)
        waiting = waiting[len(results) :]
        if died is None:
            if waiting:
                message = f"{len(waiting)} calls have no result, but their process did not die"
                raise AssertionError(message)
            return
        killer = waiting.pop(0)
        if killer.size == 1:
            yield CallOutcome(killer, None, died)
        else:
            middle = killer.first + killer.size // 2
            waiting[:0] = [Call(killer.first, middle), Call(middle, killer.end)]
