"""Model of etcd in a simulated cluster: late responses, late requests, leases that end late or early.

`EtcdModel` is `mansio.testing.metadata.InMemoryStore` with a majority that can be lost; `SimulatedEtcdClient` is one
broker's way there, on which everything takes time. `KeepAliveTurns` runs the shipped keep-alive, whose thread is a
scheduler of its own here.

Always true: what was sent before a broker died still arrives; a watch tells every change in order, at the earliest when
it happened; while there is no majority nothing is read or written, and no lease ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from mansio.errors import MansioError, Unavailable
from mansio.metadata.metadata_store import AmbiguousOutcome, Delete, LeaseExpired
from mansio.node.lease_keep_alive import LeaseKeepAlive
from mansio.testing.metadata import InMemoryStore, InMemoryStoreClient
from support.present import present

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from mansio.metadata.broker_lifecycle import BrokerLifecycle
    from mansio.metadata.metadata_store import Compare, Event, Put, TransactionResult
    from mansio.ports import Clock
    from mansio.testing.scheduler import SimulatedScheduler, Simulation

T = TypeVar("T")

CALL_MS_MAX = 1000
"""A call that is not answered in this time is given up; etcd may carry it out all the same."""


class EtcdModel(InMemoryStore):
    """See the module. `renewed_ms`: when each lease was last granted or renewed, in simulated time."""

    def __init__(self, simulation: Simulation, clock: Clock, scheduler: SimulatedScheduler) -> None:
        super().__init__(clock, scheduler)
        self.simulation = simulation
        self.without_majority = False
        self.on_early_end: Callable[[int, int], None] | None = None
        """Called with node id and epoch of a session that a transaction has deleted: its lease has not ended."""
        self.renewed_ms: dict[int, float] = {}
        self.ttl_ms: dict[int, float] = {}

    def grant(self, ttl_s: float) -> int:
        lease = super().grant(ttl_s)
        self.renewed_ms[lease], self.ttl_ms[lease] = self.simulation.now_ms, ttl_s * 1000
        return lease

    def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TransactionResult:
        gone = [
            self._entries[one.key]
            for one in operations
            if isinstance(one, Delete) and one.key.endswith("/session") and one.key in self._entries
        ]
        done = super().transact(compares, operations)
        if done.succeeded and self.on_early_end is not None:
            for entry in gone:
                self.on_early_end(int(entry.key.split("/")[-2]), entry.create_revision)
        return done

    def keep_alive(self, lease: int) -> float:
        left_s = super().keep_alive(lease)
        self.renewed_ms[lease] = self.simulation.now_ms
        return left_s

    def expire_leases(self) -> None:
        if not self.without_majority:
            super().expire_leases()

    def _watch_expiry(self) -> None:
        if not self.without_majority:
            super()._watch_expiry()

    def lose_majority(self) -> None:
        """No request is answered; time does not pass for leases."""
        self.without_majority = True

    def elect(self) -> None:
        """There is a majority, and a new leader among etcd's members: all leases live for their whole time again."""
        self.without_majority = False
        for lease, (ttl_s, _) in list(self._leases.items()):
            self._leases[lease] = (ttl_s, self._clock.monotonic() + ttl_s)
        self._watch_expiry()
        self.wake()


class SimulatedEtcdClient(InMemoryStoreClient):
    """`MetadataStore` and `Leases` of one broker's life."""

    def __init__(self, store: EtcdModel, scheduler: SimulatedScheduler, etcd: SimulatedScheduler) -> None:
        super().__init__(store, scheduler)
        self.model = store
        self._etcd = etcd
        self.random = store.simulation.random
        self.delay_ms = lambda: self.random.uniform(0.2, 2.0)
        self.late_requests = 0
        """So many transactions happen long after their sender gave up."""

    def _check(self) -> None:
        if self._closed:
            raise Unavailable("the metadata store is closed")
        if self.unreachable or self.model.without_majority:
            raise Unavailable("the metadata store cannot be reached")

    def _later(self, step: Callable[..., object], *args: Any) -> None:
        raise AssertionError("requests and answers take different ways here")

    async def _call(self, work: Callable[[], T]) -> T:
        """The request arrives whatever becomes of its sender; the answer needs it alive."""
        assert self.delay_ms is not None
        self._check()
        promise = self._scheduler.promise()

        def complete(answer: Any, error: MansioError | None) -> None:
            if promise.done():
                return
            if error is None:
                promise.set_result(answer)
            else:
                promise.set_exception(error)

        def arrive() -> None:
            answer, error = None, None
            try:
                self._check()
                answer = work()
            except MansioError as refused:
                error = refused
            self._scheduler.call_later(present(self.delay_ms)(), complete, answer, error)

        self._etcd.call_later(self.delay_ms(), arrive)
        timer = self._scheduler.call_later(CALL_MS_MAX, complete, None, AmbiguousOutcome("no answer in time"))
        try:
            return await promise
        finally:
            timer.cancel()

    def _transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> TransactionResult:
        if self.late_requests > 0:
            self.late_requests -= 1
            self._etcd.call_later(self.random.uniform(500, 5000), self._transact_late, compares, operations)
            raise AmbiguousOutcome("the request is still on its way")
        return super()._transact(compares, operations)

    def _transact_late(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
        try:
            if not self.model.without_majority:
                self.store.transact(compares, operations)
        except LeaseExpired:
            return

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        """Sent some time after it happened; a broker that is away receives it when it is back."""
        position = from_revision
        while not self._closed:
            away = self.unreachable or self.watch_stalls or self.model.without_majority
            if away or position > self.store.revision:
                await self._woken()
                continue
            events, position = self.store.events(prefix, position)
            if events:
                yield events

    async def _woken(self) -> None:
        """The store's promise belongs to the store: what follows from it happens in this broker's own turns."""
        assert self.delay_ms is not None
        promise = self._scheduler.promise()

        def tell(_: object) -> None:
            self._scheduler.call_later(present(self.delay_ms)(), promise.set_result, None)

        self.store.next_change().add_done_callback(tell)
        await promise


class _Waits(Exception):
    """The keep-alive's thread waits for so long."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s


class _Turn:
    """What the keep-alive's thread waits on between two renewals: here it ends the turn."""

    def __init__(self) -> None:
        self._stopped = False
        self.fresh = True

    def set(self) -> None:
        self._stopped = True

    def wait(self, wait_s: float) -> bool:
        if not self.fresh and not self._stopped:
            raise _Waits(wait_s)
        self.fresh = False
        return self._stopped


class _SentEarlier:
    """The clock of that thread: the next look at it gives the time a request was sent at, which is a while ago."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.sent_at: float | None = None

    def wall_ms(self) -> int:
        return self._clock.wall_ms()

    def monotonic(self) -> float:
        sent_at, self.sent_at = self.sent_at, None
        return self._clock.monotonic() if sent_at is None else sent_at


class KeepAliveTurns(LeaseKeepAlive):
    """The shipped keep-alive; its thread takes turns on `thread`, a scheduler that goes on when the main loop hangs."""

    def __init__(
        self,
        membership: BrokerLifecycle,
        etcd_client: SimulatedEtcdClient,
        *,
        clock: Clock,
        scheduler: SimulatedScheduler,
        thread: SimulatedScheduler,
        ttl_s: float,
    ) -> None:
        self._thread_clock = _SentEarlier(clock)
        super().__init__(
            keep_alive_once=self._ask,
            current_session=lambda: membership.session_to_renew,
            on_session_end=membership.end_session,
            clock=self._thread_clock,
            scheduler=scheduler,
            ttl_s=ttl_s,
        )
        self._etcd_client = etcd_client
        self._turns = thread
        self._stopped = _Turn()  # type: ignore[assignment]  # what of an Event is used

    def start(self) -> None:
        self._record_liveness()
        self._turns.call_soon(self._send)

    def _send(self) -> None:
        assert self._etcd_client.delay_ms is not None
        sent_at = self._thread_clock.monotonic()
        self._turns.call_later(2 * self._etcd_client.delay_ms(), self._arrive, sent_at)

    def _arrive(self, sent_at: float) -> None:
        self._stopped.fresh = True  # type: ignore[attr-defined]
        self._thread_clock.sent_at = sent_at
        try:
            self._run()
        except _Waits as waits:
            self._turns.call_later(max(1.0, waits.wait_s * 1000), self._send)
        finally:
            self._thread_clock.sent_at = None

    def _ask(self, lease: int) -> float:
        etcd_client = self._etcd_client
        etcd_client._check()
        left_s = etcd_client.model.keep_alive(lease)
        if etcd_client.lost_response_count > 0:
            etcd_client.lost_response_count -= 1
            raise Unavailable("the answer was lost")
        return left_s
