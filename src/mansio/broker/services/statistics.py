"""Statistics of a broker: latency histograms, and errors by request.

Updated by the request handlers, read by `/metrics`.

Invariants:
* Nothing is updated per record. Latencies are measured for one request in `SAMPLE_EVERY`, chosen by count and not by
  outcome, so that slow requests are as likely to be measured as fast ones.
* Memory is bounded: histograms have fixed buckets, errors are counted per API and Kafka error code, and codes come from
  this program, not from clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mansio.ports import Clock

SAMPLE_EVERY: Final = 16
SAMPLE_MASK: Final = SAMPLE_EVERY - 1
"""A request is measured when these bits of the count of its kind are all zero."""

SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
"""Upper bounds of the buckets."""

ANSWER_ITEMS_MAX: Final = 1000
ANSWER_DEPTH_MAX: Final = 3


class Histogram:
    """Durations in seconds. `counts` has one entry per bucket and one for values above the last bound.

    One thread writes, any may read: a reader may see a sum that is one observation ahead of the counts.
    """

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds


class Stopwatch:
    """One duration being measured."""

    __slots__ = ("_began", "_clock", "_into")

    def __init__(self, clock: Clock, into: Histogram) -> None:
        self._clock = clock
        self._into = into
        self._began = clock.monotonic()

    def stop(self) -> None:
        self._into.observe(self._clock.monotonic() - self._began)


class Statistics:
    """One per broker; all methods run on its event loop except `observe` of `sync`, which the flush thread calls."""

    __slots__ = ("_clock", "acknowledge", "errors", "fetch", "fetch_waited", "sync")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.acknowledge = Histogram()
        """From the append of a batch with acks=all to its acknowledgement."""
        self.fetch = Histogram()
        """Fetches that were answered at once."""
        self.fetch_waited = Histogram()
        """Fetches that waited for data or for their timeout."""
        self.sync = Histogram()
        """One fsync, shared by all batches that waited when it began."""
        self.errors: dict[tuple[int, int], int] = {}
        """(API key, Kafka error code): number of requests, or items of requests, answered with this error."""

    def time(self, into: Histogram) -> Stopwatch:
        """Start to measure a duration."""
        return Stopwatch(self._clock, into)

    def count_error(self, api_key: int, error_code: int) -> None:
        """A request, or an item of one, is answered with an error."""
        key = (api_key, error_code)
        self.errors[key] = self.errors.get(key, 0) + 1

    def count_errors(self, api_key: int, fields: Mapping[str, Any]) -> None:
        """Count the errors in the fields of a response; of a very long one, those of its first items."""
        self._count(api_key, fields, ANSWER_DEPTH_MAX)

    def _count(self, api_key: int, fields: Mapping[str, Any], depth: int) -> None:
        code = fields.get("error_code", 0)
        if code:
            self.count_error(api_key, int(code))
        if not depth:
            return
        for value in fields.values():
            if isinstance(value, list | tuple):
                for item in value[:ANSWER_ITEMS_MAX]:
                    if not isinstance(item, Mapping):
                        break
                    self._count(api_key, item, depth - 1)
