"""What a receiver asks for and says next, of which broker: records on lease, never more than there is room for.

Fetches ask for so many records and not one more (KIP-1206), wait at the broker for them, and take along what is to be
said of leases; where a broker offers nothing else, ShareAcknowledge says the rest. How that goes to a broker and back
is the business of `lease_sessions`.

Always true: the records asked for and those held are at most `max_records`, apart from those that somebody is done
with; every partition is asked for of its leader, as far as that is known, and of nobody else; what is to be said
is sent in the turn of the loop in which that is possible; no look at all of it is taken where nothing can be asked for.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from mansio.client.leader_cache import LeaderCache
from mansio.client.share.leased import RENEW
from mansio.client.share.share_requests import has
from mansio.client.share.share_sessions import ShareSessions
from mansio.client.tasks import client_failed
from mansio.net.earliest_timer import EarliestTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from mansio.client.share.ack_sender import AckSender
    from mansio.client.share.in_flight_records import InFlightRecords
    from mansio.client.share.leased import ReceiveOptions
    from mansio.client.share.pending_ack import PendingAcks
    from mansio.client.share.share_requests import ShareSession, TopicIds
    from mansio.client.tasks import Tasks
    from mansio.errors import MansioError
    from mansio.net.cluster import Cluster
    from mansio.wire.topic_partition import TopicPartition


class ShareFetcher:
    """Of one receiver. All methods belong to the loop's thread."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        in_flight_records: InFlightRecords,
        ack_sender: AckSender,
        tasks: Tasks,
        fail: Callable[[MansioError], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._in_flight_records = in_flight_records
        self._ack_sender = ack_sender
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._sessions = ShareSessions(
            cluster, options, member_id, in_flight_records, ack_sender, tasks, fail, self
        )
        self._leader_cache = LeaderCache(cluster, tasks, self.wake, refreshes=False)
        self._earliest_timer = EarliestTimer(self._loop, self.wake)
        self.assigned: TopicIds = {}
        self._blocked: dict[TopicPartition, tuple[float, int]] = {}
        """Partitions that are not asked for until then, and how often in a row that came about."""
        self._turn = 0
        self._woken = False
        self._is_idle = True
        """Whether there may be a session that could ask for records, if there were room for them."""
        self._is_paused = False
        self._is_closed = False
        ack_sender.leader_of = self._leader_of
        ack_sender.on_pending = self._enqueue

    def assign(self, partitions: TopicIds) -> None:
        """Fetch these, and nothing else. What is leased of others stays so."""
        self.assigned = dict(partitions)
        self._ack_sender.ids.update(partitions)
        self.wake()

    def pause(self) -> None:
        """Fetch nothing more; what is leased can be settled."""
        self._is_paused = True

    def on_capacity(self) -> None:
        """Ask for more records, in the loop's next turn, if some session can do that now."""
        if self._is_idle and self._room > 0:
            self.wake()

    def wake(self) -> None:
        """Look at everything once more, in the loop's next turn."""
        if not self._woken and not self._is_closed:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def _enqueue(self) -> None:
        """Send what is to be said of leases: with a fetch if one can go out now, else beside."""
        if self._is_closed:
            return
        if (
            (self._is_idle and self._room > 0)
            or not all(self._ack_sender.supports_acknowledge_records.values())
            or self._sessions.has_closed_connection
        ):
            self._dispatch()
            return
        try:
            now = self._loop.time()
            self._ack_sender.dispatch(self._ack_sender.waiting(now), now)
        except Exception as error:  # noqa: BLE001  # it ends nothing but this round, and the receiver is told
            self.broke(error)

    def broke(self, error: Exception) -> None:
        """Something happened that nobody foresaw: the receiver is told, and it goes on."""
        self._leader_cache.forget()
        self._fail(client_failed(error))
        self._earliest_timer.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    # -- choosing --------

    @property
    def _room(self) -> int:
        """How many records may be asked for now."""
        in_flight_records, most = self._in_flight_records, self._options.max_records
        if self._is_paused or in_flight_records.undelivered_bytes >= self._options.prefetch_bytes_max:
            return 0
        room = (
            min(
                most - (in_flight_records.held - in_flight_records.acknowledging),
                2 * most - in_flight_records.held,
            )
            - self._sessions.reserved
        )
        # One record at a time would have the brokers send large batches over and over again.
        return room if in_flight_records.undelivered == 0 or room * 2 >= most else 0

    def _dispatch(self) -> None:
        self._woken = False
        if self._is_closed:
            return
        try:
            now = self._loop.time()
            waiting = self._ack_sender.waiting(now)
            leading = self._by_leader(now)
            self._verify_suspects(now)
            self._start(leading, waiting, now)
            self._ack_sender.dispatch(waiting, now)
        except Exception as error:  # noqa: BLE001  # it ends nothing but this round, and the receiver is told
            self.broke(error)

    def _by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        found: dict[int, list[TopicPartition]] = {}
        for partition in self.assigned:
            if (node := self._leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def _leader_of(self, partition: TopicPartition, now: float) -> int | None:
        """The broker to ask now; None while there is none, or it has just refused."""
        blocked = self._blocked.get(partition)
        if blocked is not None and blocked[0] > now:
            self._earliest_timer.set(blocked[0])
            return None
        node = self._leader_cache.find(*partition, now)
        if node is None:
            self._leader_cache.look_up(*partition, partial(self.refused, partition))
        return node

    def _start(
        self, leading: dict[int, list[TopicPartition]], waiting: dict[int, list[TopicPartition]], now: float
    ) -> None:
        """One request to every session that has none under way, and something to ask or say."""
        self._is_idle = False
        free: list[tuple[int, ShareSession]] = []
        for node in dict.fromkeys([*leading, *waiting, *self._sessions.by_node]):
            session = self._sessions.with_broker(node)
            if session.busy:
                continue
            if session.blocked_until > now:
                self._earliest_timer.set(session.blocked_until)
                continue
            self._sessions.check_connection(node, session)
            free.append((node, session))
        requested = [node for node, _ in free if node in leading]
        if requested:
            self._turn = (self._turn + 1) % len(free)
            free = free[self._turn :] + free[: self._turn]
        left = len(requested)
        suspect = set(self._in_flight_records.suspects.values())
        for node, session in free:
            share = 0
            if node in leading:
                share = max(0, -(-self._room // left))
                left -= 1
            partitions = leading.get(node, [])
            is_open = session.epoch > 0
            native = self._ack_sender.supports_acknowledge_records.get(node, True)
            taken: PendingAcks = {}
            if is_open and node in waiting and (share or not native):
                taken = self._ack_sender.take_for_session(waiting[node], everything=not native)
            if has(taken, RENEW) or (taken and not share):
                self._sessions.acknowledge(node, session, taken)
            elif share or (not is_open and (node in suspect or (node in waiting and not native))):
                self._sessions.fetch(node, session, partitions, share, taken)
            elif node in leading:
                self._is_idle = True

    def _verify_suspects(self, now: float) -> None:
        """Ask about suspect leases as soon as the broker to be asked has a session that will not end them."""
        for partition, ended in list(self._in_flight_records.suspects.items()):
            node = self._leader_of(partition, now)
            if node is None:
                continue
            session = self._sessions.by_node.get(node)
            is_open = session is not None and session.epoch > 0
            if node != ended or is_open:
                native = self._ack_sender.supports_acknowledge_records.get(node, True)
                self._in_flight_records.verify(partition, can_renew=native)

    # -- what became of it --------

    def fetched(self, *, is_answered: bool) -> None:
        """A session is free, and the room that its fetch had been given."""
        self._is_idle = True
        if (
            not is_answered
            or self._room > 0
            or self._ack_sender.has_pending
            or self._in_flight_records.suspects
        ):
            self.wake()

    def served(self, known: Container[TopicPartition], refused: Container[TopicPartition]) -> None:
        """What a broker has answered for and not refused is asked for again without a pause."""
        for partition in [each for each in self._blocked if each in known and each not in refused]:
            del self._blocked[partition]

    def refused(self, partition: TopicPartition, error: MansioError) -> None:
        """Not from this broker, or not now."""
        if not error.retriable:
            self._fail(error)
        self._cluster.mark_stale((partition.topic,))
        failures = self._blocked.get(partition, (0.0, 0))[1] + 1
        extend_until = self._loop.time() + self._options.backoff.delay_seconds(failures)
        self._blocked[partition] = (extend_until, failures)

    # -- the end --------

    async def end_sessions(self) -> None:
        """Tell every broker: what is still leased is released at once."""
        await self._sessions.end()

    async def close(self) -> None:
        """Stop. What is under way is thrown away."""
        self._is_closed = True
        self._earliest_timer.cancel()
        await self._sessions.close()
