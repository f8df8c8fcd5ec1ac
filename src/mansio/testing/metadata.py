"""In-memory metadata store with etcd's semantics, leases on a simulated clock, and faults.

All brokers of a simulated cluster share one `InMemoryStore`. Each broker has an `InMemoryStoreClient`, which implements
the ports `MetadataStore` and `Leases`. A test sets faults on a client, or on the store for all clients.

Invariants:
* `history` contains every change, also those whose callers got an error.
* When a lease expires, all keys that are attached to it are deleted in one revision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from mansio.errors import InvalidRequest, MansioError, Unavailable
from mansio.metadata.metadata_store import (
    AmbiguousOutcome,
    Compare,
    Delete,
    Entry,
    Event,
    LeaseExpired,
    Listing,
    Put,
    RevisionCompacted,
    TransactionResult,
)
from mansio.ports import complete, complete_with_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.ports import Clock, Promise, Scheduler, Timer

    Events = list[Event]

T = TypeVar("T")

OPERATIONS_MAX: Final = 128
WATCH_BATCH_EVENTS_MAX: Final = 512


class InMemoryStore:
    """Key-value store with revisions, watches and leases. Every call takes effect immediately; clients add delays."""

    def __init__(self, clock: Clock, scheduler: Scheduler, *, events_kept: int = 1 << 30) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._events_kept = events_kept
        self._entries: dict[str, Entry] = {}
        self._lease_of: dict[str, int] = {}
        self._leases: dict[int, tuple[float, float]] = {}  # time to live, and when it ends
        self._last_lease = 1000
        self._waiting: list[Promise[None]] = []
        self._timer: Timer | None = None
        self.revision = 0
        self.compacted = 0
        self.history: list[Event] = []
        """Every change since the start, including those that are compacted."""

    def store_client(self, scheduler: Scheduler | None = None) -> InMemoryStoreClient:
        """Create the client of one broker. Responses arrive on `scheduler`, by default that of the store."""
        return InMemoryStoreClient(self, scheduler or self._scheduler)

    def get(self, key: str) -> Entry | None:
        self.expire_leases()
        return self._entries.get(key)

    def list(self, prefix: str) -> Listing:
        self.expire_leases()
        found = [self._entries[key] for key in sorted(self._entries) if key.startswith(prefix)]
        return Listing(self.revision, found)

    def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TransactionResult:
        self.expire_leases()
        if max(len(compares), len(operations)) > OPERATIONS_MAX:
            raise InvalidRequest(f"more than {OPERATIONS_MAX} conditions or operations in a transaction")
        if len({operation.key for operation in operations}) != len(operations):
            raise InvalidRequest("a key is named by two operations of a transaction")
        if not all(self._holds(compare) for compare in compares):
            return TransactionResult(False, self.revision)
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseExpired
        self._apply(operations)
        return TransactionResult(True, self.revision)

    def grant(self, ttl_s: float) -> int:
        self._last_lease += 1
        self._leases[self._last_lease] = (ttl_s, self._clock.monotonic() + ttl_s)
        self._watch_expiry()
        return self._last_lease

    def keep_alive(self, lease: int) -> float:
        self.expire_leases()
        if lease not in self._leases:
            raise LeaseExpired
        ttl_s, _ = self._leases[lease]
        self._leases[lease] = (ttl_s, self._clock.monotonic() + ttl_s)
        return ttl_s

    def renew_all_leases(self) -> None:
        """Renew all leases, as etcd does after an election among its own members."""
        for lease in tuple(self._leases):
            self.keep_alive(lease)

    def end_lease(self, lease: int) -> None:
        """End a lease before its time to live is over, and delete its keys."""
        if self._leases.pop(lease, None) is not None:
            keys = sorted(key for key, held in self._lease_of.items() if held == lease)
            self._apply([Delete(key) for key in keys])

    def end_all_leases(self) -> None:
        """End all leases, as if the store had been stopped for longer than their time to live."""
        for lease in tuple(self._leases):
            self.end_lease(lease)

    def expire_leases(self) -> None:
        """End expired leases. Called by a timer, and before every read and write."""
        now = self._clock.monotonic()
        for lease in [lease for lease, (_, ends_at) in self._leases.items() if ends_at <= now]:
            self.end_lease(lease)

    def _watch_expiry(self) -> None:
        if self._leases and self._timer is None:
            left_s = min(ends_at for _, ends_at in self._leases.values()) - self._clock.monotonic()
            self._timer = self._scheduler.call_later(max(1.0, 1000 * left_s), self._check_leases)

    def _check_leases(self) -> None:
        self._timer = None
        self.expire_leases()
        self._watch_expiry()

    def compact(self) -> None:
        """Compact all revisions so far: watches that start at an older revision raise `RevisionCompacted`."""
        self.compacted = self.revision

    def events(self, prefix: str, position: int) -> tuple[Sequence[Event], int]:
        """(events of whole revisions from `position` on, revision at which the next call has to start)."""
        if position <= self.compacted:
            raise RevisionCompacted(
                f"changes up to revision {self.compacted} are compacted; {position} was requested"
            )
        found: Events = []
        for event in self.history[self._first_at(position) :]:
            if len(found) >= WATCH_BATCH_EVENTS_MAX and event.mod_revision != found[-1].mod_revision:
                return found, event.mod_revision
            if event.key.startswith(prefix):
                found.append(event)
        return found, self.revision + 1

    def next_change(self) -> Promise[None]:
        """A promise that completes with the next change or fault."""
        promise: Promise[None] = self._scheduler.promise()
        self._waiting.append(promise)
        return promise

    def wake(self) -> None:
        """Complete the promises of `next_change`, so that every watch checks for events."""
        waiting, self._waiting = self._waiting, []
        for promise in waiting:
            complete(promise, None)

    def _first_at(self, position: int) -> int:
        low, high = 0, len(self.history)
        while low < high:
            middle = (low + high) // 2
            if self.history[middle].mod_revision < position:
                low = middle + 1
            else:
                high = middle
        return low

    def _holds(self, compare: Compare) -> bool:
        entry = self._entries.get(compare.key)
        modified, created = (entry.mod_revision, entry.create_revision) if entry else (0, 0)
        return compare.mod_revision in (None, modified) and compare.create_revision in (None, created)

    def _apply(self, operations: Sequence[Put | Delete]) -> None:
        revision = self.revision + 1
        events = []
        for operation in operations:
            key = operation.key
            before = self._entries.get(key)
            self._lease_of.pop(key, None)
            if isinstance(operation, Put):
                created = revision if before is None else before.create_revision
                self._entries[key] = Entry(key, operation.value, created, revision)
                if operation.lease:
                    self._lease_of[key] = operation.lease
                events.append(Event(key, operation.value, created, revision))
            elif before is not None:
                del self._entries[key]
                events.append(Event(key, None, 0, revision))
        if events:
            self.revision = revision
            self.history += events
            self.compacted = max(self.compacted, revision - self._events_kept)
            self.wake()


class InMemoryStoreClient:
    """Client of one broker for an `InMemoryStore`, with the ports `MetadataStore` and `Leases`. Faults apply to calls
    that start after a test has set them."""

    def __init__(self, store: InMemoryStore, scheduler: Scheduler) -> None:
        self.store = store
        self._scheduler = scheduler
        self.delay_ms: Callable[[], float] | None = None
        """Returns the delay in ms of one request or response; None: until the next iteration of the event loop."""
        self._closed = False
        self.unreachable = False
        """Whether every call fails without reaching the store."""
        self.lost_response_count = 0
        """Number of following transactions that are executed but whose response is lost."""
        self.lost_request_count = 0
        """Number of following transactions that are lost before they are executed."""
        self.watch_stalls = False
        """Whether watches return no events."""
        self.before_transaction: Callable[[], None] | None = None
        """Called once, immediately before the next transaction is executed, to simulate a concurrent change."""

    @property
    def operations_max(self) -> int:
        return OPERATIONS_MAX

    async def get(self, key: str) -> Entry | None:
        return await self._read(lambda: self.store.get(key))

    async def list(self, prefix: str) -> Listing:
        return await self._read(lambda: self.store.list(prefix))

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        done = await self._call(lambda: self._transact(compares, operations))
        if self.lost_response_count > 0 or self.unreachable or self._closed:
            self.lost_response_count = max(0, self.lost_response_count - 1)
            raise AmbiguousOutcome("the answer was lost")
        return done

    def _transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TransactionResult:
        if self.lost_request_count > 0:
            self.lost_request_count -= 1
            raise AmbiguousOutcome("the request was lost")
        between, self.before_transaction = self.before_transaction, None
        if between is not None:
            between()
        return self.store.transact(compares, operations)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        position = from_revision
        while not self._closed:
            if self.unreachable or self.watch_stalls or position > self.store.revision:
                await self.store.next_change()
                continue
            events, position = self.store.events(prefix, position)
            if events:
                yield events

    def heal(self) -> None:
        """Remove all faults."""
        self.unreachable = self.watch_stalls = False
        self.lost_response_count = self.lost_request_count = 0
        self.store.wake()

    async def grant(self, ttl_s: float) -> int:
        return await self._read(lambda: self.store.grant(ttl_s))

    async def keep_alive_once(self, lease: int) -> float:
        return await self._read(lambda: self.store.keep_alive(lease))

    async def revoke(self, lease: int) -> None:
        await self._read(lambda: self.store.end_lease(lease))

    async def close(self) -> None:
        """End the watches of this client; the store stays open."""
        self._closed = True
        self.store.wake()

    async def _read(self, read: Callable[[], T]) -> T:
        """Send a request, and raise `Unavailable` if a fault was set while it was under way."""
        answer = await self._call(read)
        self._check()
        return answer

    async def _call(self, work: Callable[[], T]) -> T:
        """Send a request and wait for the response. The request is executed even if the caller is cancelled."""
        self._check()
        promise: Promise[T] = self._scheduler.promise()

        def arrive() -> None:
            try:
                self._check()
                self._later(complete, promise, work())
            except MansioError as error:
                self._later(complete_with_error, promise, error)

        self._later(arrive)
        return await promise

    def _later(self, step: Callable[..., object], *args: Any) -> None:
        if self.delay_ms is None:
            self._scheduler.call_soon(step, *args)
        else:
            self._scheduler.call_later(self.delay_ms(), step, *args)

    def _check(self) -> None:
        if self._closed:
            raise Unavailable("the metadata store is closed")
        if self.unreachable:
            raise Unavailable("the metadata store cannot be reached")
