"""Statistics of a broker: latency histograms, numbers of errors by API, and which request held the event loop longest.

Request handlers update them; `/metrics` reads them.

Invariants:
* Nothing is updated per record. Latencies are measured for one request in `SAMPLE_EVERY`, chosen by their number
  and not by their outcome, so that slow requests are as likely to be measured as fast ones.
* Memory is bounded: histograms have fixed buckets, errors are counted per API and Kafka error code, and the codes come
  from this program, not from clients.
"""

from __future__ import annotations

import types
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from mansio.ports import Clock

T = TypeVar("T")

SAMPLE_EVERY: Final = 16
"""One request in this many is measured."""

SAMPLE_MASK: Final = SAMPLE_EVERY - 1
"""A request is measured if these bits of the counter of its API are all zero."""

LATENCY_BUCKET_BOUNDS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0
)  # fmt: skip
"""Upper bounds of the buckets of latency histograms, in seconds."""

HOLD_S_MIN: Final = 0.001
"""Duration below which a hold is not noted: requests with many items let others run after about this time."""

PROTOCOLS: Final = ("kafka", "http", "grpc", "sqs")
"""Protocols whose holds are noted."""

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


class LoopHold(NamedTuple):
    """One hold: its duration, the protocol, the API or route, and the address of the client."""

    hold_ms: float
    protocol: str
    request: str
    peer: str


class LoopHolds:
    """The longest holds of one broker's event loop: a request that runs lets no other one run. Each protocol measures
    its requests: those that run at once with `note`, coroutines with `measured`, step by step. All methods run on the
    loop."""

    __slots__ = ("_recent", "longest_s", "now")

    def __init__(self, clock: Clock) -> None:
        self.now = clock.monotonic
        self.longest_s = dict.fromkeys(PROTOCOLS, 0.0)
        """The longest hold of each protocol since the start, of those that were noted, in seconds."""
        self._recent: LoopHold | None = None

    def note(self, held_s: float, protocol: str, request: str, peer: str) -> None:
        """Note a hold of `HOLD_S_MIN` or more."""
        held_ms = held_s * 1000
        self.longest_s[protocol] = max(self.longest_s[protocol], held_s)
        if self._recent is None or held_ms > self._recent.hold_ms:
            self._recent = LoopHold(held_ms, protocol, request, peer)

    @property
    def hold_ms_max(self) -> float:
        """The longest hold since the start."""
        return max(self.longest_s.values()) * 1000

    def take_recent(self) -> LoopHold | None:
        """Return the longest hold since the last call, None if there was none."""
        found, self._recent = self._recent, None
        return found

    async def measured(
        self,
        start: Callable[[], Coroutine[Any, Any, T]],
        protocol: str,
        label: Callable[[], tuple[str, str]],
    ) -> T:
        """Run the coroutine that `start` returns and note its holds. `label` returns the request and the peer; it is
        called for a hold. `start` is called in the first step: a task that is cancelled before it leaves no coroutine
        that was never awaited."""
        return await self._run(start(), protocol, label)

    @types.coroutine
    def _run(
        self, coroutine: Coroutine[Any, Any, T], protocol: str, label: Callable[[], tuple[str, str]]
    ) -> Generator[Any, Any, T]:
        sent: Any = None
        awaited: Any = None
        is_thrown = False
        while True:
            if not is_thrown:
                began = self.now()
                try:
                    awaited = coroutine.send(sent)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self._note(began, protocol, label)
            is_thrown = False
            try:
                try:
                    sent = yield awaited
                finally:
                    awaited = None  # a future's error refers to this frame
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001  # passed on; only this clause refers to it
                is_thrown = True
                began = self.now()
                try:
                    awaited = coroutine.throw(error)
                except StopIteration as end:
                    result = end.value
                    return result
                finally:
                    self._note(began, protocol, label)

    def _note(self, began: float, protocol: str, label: Callable[[], tuple[str, str]]) -> None:
        held_s = self.now() - began
        if held_s >= HOLD_S_MIN:
            self.note(held_s, protocol, *label())


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
