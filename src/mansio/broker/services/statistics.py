"""Statistics of a broker: latency histograms, and numbers of errors by API.

Request handlers update them; `/metrics` reads them.

Invariants:
* Nothing is updated per record. Latencies are measured for one request in `SAMPLE_EVERY`, chosen by their number
  and not by their outcome, so that slow requests are as likely to be measured as fast ones.
* Memory is bounded: histograms have fixed buckets, errors are counted per API and Kafka error code, and the codes come
  from this program, not from clients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mansio.broker.services.loop_holds import LoopHolds

if TYPE_CHECKING:
    from mansio.ports import Clock

SAMPLE_EVERY: Final = 16
"""One request in this many is measured."""

SAMPLE_MASK: Final = SAMPLE_EVERY - 1
"""A request is measured if these bits of the counter of its API are all zero."""

LATENCY_BUCKET_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
"""Upper bounds of the buckets of latency histograms, in seconds."""

COUNTED_ITEMS_MAX: Final = 1000
"""Number of items of each list in a response whose errors are counted."""

COUNTED_DEPTH_MAX: Final = 3
"""Depth of nested lists in a response in which errors are counted."""


class Histogram:
    """Histogram of durations in seconds. `counts` has one entry per bucket, and one for values above the last bound.

    One thread writes, and any thread may read. A reader may see counts that are one observation ahead of the sum.
    """

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKET_BOUNDS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds


class Stopwatch:
    """Measurement of one duration, from the creation of this object to `stop`."""

    __slots__ = ("_began", "_clock", "_histogram")

    def __init__(self, clock: Clock, histogram: Histogram) -> None:
        self._clock = clock
        self._histogram = histogram
        self._began = clock.monotonic()

    def stop(self) -> None:
        """Add the duration to the histogram."""
        self._histogram.observe(self._clock.monotonic() - self._began)


class Statistics:
    """Statistics of one broker. All methods run on its event loop, except `flush_latency.observe`, which the flush
    thread calls."""

    __slots__ = (
        "_clock",
        "acknowledge_latency",
        "errors",
        "fetch_latency",
        "flush_latency",
        "holds",
        "parked_fetch_latency",
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.acknowledge_latency = Histogram()
        """Time from the append of a batch with acks=all to its acknowledgement."""
        self.fetch_latency = Histogram()
        """Duration of fetches that were answered at once."""
        self.parked_fetch_latency = Histogram()
        """Duration of fetches that waited for records or for their timeout."""
        self.flush_latency = Histogram()
        """Duration of one flush (fdatasync), which is for all batches that wait when it begins."""
        self.holds = LoopHolds(clock)
        self.errors: dict[tuple[int, int], int] = {}
        """Number of requests, or items of requests, that were answered with an error, by (API key, Kafka error
        code)."""

    def start_stopwatch(self, histogram: Histogram) -> Stopwatch:
        """Start to measure a duration for `histogram`."""
        return Stopwatch(self._clock, histogram)

    def count_error(self, api_key: int, error_code: int) -> None:
        """Count an error in the response to a request, or to one of its items."""
        key = (api_key, error_code)
        self.errors[key] = self.errors.get(key, 0) + 1

    def count_errors(self, api_key: int, fields: Mapping[str, Any]) -> None:
        """Count the errors in the fields of a response; in very long lists only those of the first `COUNTED_ITEMS_MAX`
        items."""
        self._count_errors_in(api_key, fields, COUNTED_DEPTH_MAX)

    def _count_errors_in(self, api_key: int, fields: Mapping[str, Any], depth: int) -> None:
        code = fields.get("error_code", 0)
        if code:
            self.count_error(api_key, int(code))
        if not depth:
            return
        for value in fields.values():
            if isinstance(value, list | tuple):
                for item in value[:COUNTED_ITEMS_MAX]:
                    if not isinstance(item, Mapping):
                        break
                    self._count_errors_in(api_key, item, depth - 1)
