"""Append of clients' batches that the features of a topic inspect (`AppendPipeline`).

A batch is inspected once: it is decompressed once, only for the features that the topic has enabled, for all of them.
Then each feature, in a fixed order, accepts it, rejects it by raising, replaces it or adds batches, and adds what it
has decoded as content for its view. The partition appends all batches, and passes the contents on with them. What a
feature has to append next, for example because a record was due when it was accepted, it returns (`Following`).

Invariants:
* Nothing is changed before the batches are in the log: an append that fails leaves no trace in a feature.
* Inspecting a batch and appending it is one step of the event loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mansio.broker.partition.append_validation import inspect_records
from mansio.tracebacks import copied
from mansio.wire.batch.record_batch import TimestampType, read_header, with_log_append_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from mansio.broker.log_view.replay import ViewReplay
    from mansio.broker.partition.append_validation import AppendRules, InspectedRecords
    from mansio.broker.partition.partition_hook import AppendResult, Contents
    from mansio.ports import Buffer, Clock
    from mansio.wire.batch.record_batch import BatchHeader

    Finish = Callable[["Draft"], None]


class NewBatch(NamedTuple):
    """A batch to append. `front` replaces its header (`Log.append`); `header` is as it will be stored."""

    batch: Buffer
    header: BatchHeader
    contents: Contents | None = None
    front: bytes | None = None


class Following(NamedTuple):
    """Batches of the broker itself that a feature has to append next, with their contents.

    `done` is called with the end offset, `failed` if they were not appended, or not all of them."""

    batches: Sequence[bytes]
    contents: Sequence[Contents | None]
    done: Callable[[int], None] | None = None
    failed: Callable[[], None] | None = None


class Draft:
    """A client's batch on its way into the log.

    `batch` and `header`: as it will be stored; None if nothing of it is. `sent`: as the client sent it. `contents`:
    of `batch`. `before`: batches that are appended directly before it. `appended_ms`: the time of the append, ms
    since the Unix epoch. `first_offset`, `first_ms`: where the first record is, and when it was accepted, if it was
    before; otherwise -1. `found`: in `sent`, or in what replaced it, by reader. `known_end`: the log must be
    committed up to here before the batch is acknowledged. `keeps_timestamps`: the batch must not get the log-append
    time."""

    __slots__ = (
        "appended_ms",
        "batch",
        "before",
        "contents",
        "first_ms",
        "first_offset",
        "found",
        "front",
        "header",
        "inspected",
        "keeps_timestamps",
        "known_end",
        "sent",
    )

    def __init__(
        self, sent: Buffer, header: BatchHeader, inspected: InspectedRecords, appended_ms: int
    ) -> None:
        self.sent = sent
        self.batch: Buffer | None = sent
        self.header = header
        self.inspected = inspected
        self.found = inspected.found
        self.appended_ms = appended_ms
        self.front: bytes | None = None
        self.contents: dict[object, Any] = {}
        self.before: list[NewBatch] = []
        self.first_offset = -1
        self.first_ms = -1
        self.known_end = 0
        self.keeps_timestamps = inspected.rules.timestamp_type is TimestampType.CREATE

    def replace(self, batch: Buffer | None) -> None:
        """Store another batch instead; None: nothing."""
        self.batch = batch
        if batch is not None:
            self.header = read_header(batch)

    def stamp(self) -> None:
        """Give the batch the log-append time."""
        if self.batch is not None and not self.keeps_timestamps:
            self.front = with_log_append_time(self.batch, self.header, self.appended_ms)
            self.header = read_header(self.front)

    def add_before(self, batch: bytes, contents: Contents) -> None:
        """Append a batch directly before this one."""
        self.before.append(NewBatch(batch, read_header(batch), contents))

    def batches(self) -> list[NewBatch]:
        """Return the batches to append, in order: those added by features, then the client's, if any of it is left."""
        if self.batch is None:
            return self.before
        return [*self.before, NewBatch(self.batch, self.header, self.contents, self.front)]


class AppendFeature:
    """A feature that takes part in the appends of clients' batches."""

    __slots__ = ()

    def prepare(self, draft: Draft) -> Finish | None:
        """Check a batch and raise an error to reject it, or replace it in the draft; change nothing else. Return a
        function that is called when the batch has its final content and may add batches before it, or None. Raises
        `RebuildRequired` or `LookUpRequired` to be called again later."""

    def with_first_offset(
        self,
        known: AppendResult,
        rules: AppendRules,
        inspect: Callable[[], InspectedRecords],  # noqa: ARG002 - for those that need it
    ) -> AppendResult:
        """Return the result of a batch that an idempotent producer sends again, `known` from its sequence. `inspect`
        raises the errors of `inspect_records`."""
        del rules
        return known

    def check_later(self, batch: Buffer) -> None:
        """Check the only record of a batch that the broker itself will append later for a client. Raises the errors of
        `prepare` for which such a record is not accepted."""

    def following(self) -> Following | None:
        """Return what has to be appended after an append; None for nothing."""


class ReleasingFeature(Protocol):
    """A feature whose view needs batches of the log that retention would delete."""

    @property
    def replay(self) -> ViewReplay[Any]: ...

    def release_below(self, offset: int) -> Iterator[Following]:
        """Yield copies of the batches below an offset that the view still needs, so that retention can delete the
        originals. The caller appends each item before it takes the next one. Batches that cannot be read are not
        copied, and retention keeps them.

        Raises `NotLeaderOrFollower`, and `CoordinatorLoadInProgress` while the view is being read."""


class AppendPipeline:
    """The features of one partition that take part in appends, in their order."""

    __slots__ = ("_clock", "_name", "features")

    def __init__(self, name: str, clock: Clock) -> None:
        """`name`: that of the partition, for errors."""
        self._name = name
        self._clock = clock
        self.features: list[AppendFeature] = []

    def prepare(
        self, batch: Buffer, header: BatchHeader, rules: AppendRules, inspected: InspectedRecords | None
    ) -> Draft:
        """Inspect a client's batch and pass it to the features. `inspected`: by a thread, if it was.

        Raises the errors of `inspect_records` and of the features, `RebuildRequired`, and `LookUpRequired`."""
        inspected = self.inspect(batch, rules, inspected)
        draft = Draft(batch, header, inspected, self._clock.wall_ms())
        finishes = [finish for feature in self.features if (finish := feature.prepare(draft)) is not None]
        draft.stamp()
        for finish in finishes:
            finish(draft)
        return draft

    def inspect(
        self, batch: Buffer, rules: AppendRules, inspected: InspectedRecords | None
    ) -> InspectedRecords:
        """Return the inspection of a batch by the thread, or inspect a small batch now. Raises the errors of
        `inspect_records`."""
        if inspected is None or inspected.rules != rules:
            return inspect_records(self._name, rules, batch, self._clock.wall_ms())
        if inspected.error is not None:
            raise copied(inspected.error)
        return inspected

    def check_later(self, batch: Buffer) -> None:
        """Check the only record of a batch that the broker itself will append later for a client. Raises the errors for
        which a feature does not accept it, and `LookUpRequired`."""
        for feature in self.features:
            feature.check_later(batch)

    def with_first_offset(
        self, batch: Buffer, rules: AppendRules, inspected: InspectedRecords | None, known: AppendResult
    ) -> AppendResult:
        """Return the result of a batch that an idempotent producer sends again, `known` from its sequence, as the
        features change it. Raises the errors of `prepare`."""
        for feature in self.features:
            known = feature.with_first_offset(known, rules, partial(self.inspect, batch, rules, inspected))
        return known
