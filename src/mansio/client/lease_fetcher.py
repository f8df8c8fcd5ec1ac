"""Share sessions: records on lease from the brokers, never more than the receiver has room for (KIP-932).

Owns one session with each broker that leads something of what the member was assigned: its epoch, its partitions, its
one request under way. A session lives as long as its connection; what it leased ends with it, so everything of it is
suspect then (see `lease_book`). Fetches ask for so many records and not one more (KIP-1206), wait at the broker for
them, and take along what is to be said of leases; where a broker offers nothing else, ShareAcknowledge says the rest.

Always true: one request of a session is under way; a session error, a lost connection or a leader that moved makes a
new session, or another, and nothing else; the records asked for and those held are at most `max_records`, apart from
those that somebody is done with.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.errors import (
    ConnectionLost,
    InvalidShareSessionEpoch,
    MansioError,
    ShareSessionLimitReached,
    ShareSessionNotFound,
)
from mansio.link.alarm import Alarm
from mansio.link.retry import error_for
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .leaders import Leaders
from .leased_types import RELEASE, RENEW
from .share_requests import Session, ShareRequests, can_renew, has
from .tasks import client_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.link.cluster import Cluster
    from mansio.link.connection import Connection
    from mansio.wire import share_fetch

    from .lease_book import LeaseBook
    from .leased_types import ReceiveOptions
    from .settle_queue import Said
    from .settles import Settler
    from .tasks import Tasks

    Known = dict[TopicPartition, bytes]

logger = logging.getLogger(__name__)

HOLDING_WAIT_MS: Final = 100
"""How long a fetch may wait where acknowledgements wait behind it."""

_LANES = itertools.count()


class LeaseFetcher:
    """Of one receiver. All methods belong to the loop's thread."""

    def __init__(
        self,
        cluster: Cluster,
        options: ReceiveOptions,
        member_id: str,
        book: LeaseBook,
        settler: Settler,
        tasks: Tasks,
        fail: Callable[[MansioError], None],
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._book = book
        self._settler = settler
        self._tasks = tasks
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._leaders = Leaders(cluster, tasks, self.wake, refreshes=False)
        self._requests = ShareRequests(
            options.group, member_id, settler.ids, bytes_max=options.fetch_bytes_max
        )
        self._alarm = Alarm(self._loop, self.wake)
        self._assigned: Known = {}
        self._blocked: dict[TopicPartition, tuple[float, int]] = {}
        """Partitions that are not asked for until then, and how often in a row that came about."""
        self._sessions: dict[int, Session] = {}
        self._reserved = 0
        self._turn = 0
        self._woken = False
        self._is_paused = False
        self._is_closed = False
        self._lane = f"share {next(_LANES)}"
        settler.can_renew_in_session = self._can_renew
        settler.leader_of = self._leader_of

    def assign(self, partitions: Known) -> None:
        """Fetch these, and nothing else. What is leased of others stays so."""
        self._assigned = dict(partitions)
        self._settler.ids.update(partitions)
        self.wake()

    def pause(self) -> None:
        """Fetch nothing more; what is leased can be settled."""
        self._is_paused = True

    def wake(self) -> None:
        """Look at everything once more, in the loop's next turn."""
        if not self._woken and not self._is_closed:
            self._woken = True
            self._loop.call_soon(self._dispatch)

    def broke(self, error: Exception) -> None:
        """Something happened that nobody foresaw: the receiver is told, and it goes on."""
        self._leaders.forget()
        self._fail(client_failed(error))
        self._alarm.set(self._loop.time() + self._options.backoff.longest_ms / 1000)

    # -- choosing --------

    def _dispatch(self) -> None:
        self._woken = False
        if self._is_closed:
            return
        try:
            now = self._loop.time()
            waiting = self._settler.waiting(now)
            leading = self._by_leader(now)
            self._verify_suspects(now)
            self._start(leading, waiting, now)
            self._settler.dispatch(waiting, now)
        except Exception as error:  # noqa: BLE001  # it ends nothing but this round, and the receiver is told
            self.broke(error)

    def _by_leader(self, now: float) -> dict[int, list[TopicPartition]]:
        found: dict[int, list[TopicPartition]] = {}
        for partition in self._assigned:
            if (node := self._leader_of(partition, now)) is not None:
                found.setdefault(node, []).append(partition)
        return found

    def _leader_of(self, partition: TopicPartition, now: float) -> int | None:
        """The broker to ask now; None while there is none, or it has just refused."""
        blocked = self._blocked.get(partition)
        if blocked is not None and blocked[0] > now:
            self._alarm.set(blocked[0])
            return None
        node = self._leaders.find(*partition, now)
        if node is None:
            self._leaders.look_up(*partition, partial(self._refused, partition))
        return node

    @property
    def _room(self) -> int:
        """How many records may be asked for now."""
        book, most = self._book, self._options.max_records
        if self._is_paused or book.unbegun_bytes >= self._options.prefetch_bytes_max:
            return 0
        room = min(most - (book.held - book.settling), 2 * most - book.held) - self._reserved
        # One record at a time would have the brokers send large batches over and over again.
        return room if book.unbegun == 0 or room * 2 >= most else 0

    def _start(
        self, leading: dict[int, list[TopicPartition]], waiting: dict[int, list[TopicPartition]], now: float
    ) -> None:
        """One request to every session that has none under way, and something to ask or say."""
        free: list[tuple[int, Session]] = []
        for node in dict.fromkeys([*leading, *waiting, *self._sessions]):
            session = self._sessions.setdefault(node, Session())
            if session.busy:
                continue
            if session.blocked_until > now:
                self._alarm.set(session.blocked_until)
                continue
            self._look_at_connection(node, session)
            free.append((node, session))
        asked = [node for node, _ in free if node in leading]
        if asked:
            self._turn = (self._turn + 1) % len(free)
            free = free[self._turn :] + free[: self._turn]
        left = len(asked)
        suspect = set(self._book.suspects.values())
        for node, session in free:
            share = 0
            if node in leading:
                share = max(0, -(-self._room // left))
                left -= 1
            partitions = leading.get(node, [])
            is_open = session.epoch > 0
            native = self._settler.natives.get(node, True)
            taken: Said = {}
            if is_open and node in waiting and (share or not native):
                taken = self._settler.take_along(waiting[node], everything=not native)
            if has(taken, RENEW) or (taken and not share):
                self._spawn(self._acknowledge(node, session, taken), session, 0)
            elif share or (not is_open and (node in suspect or (node in waiting and not native))):
                self._spawn(self._fetch(node, session, partitions, share, taken), session, share)

    def _spawn(self, work: object, session: Session, share: int) -> None:
        session.busy = True
        self._reserved += share
        self._tasks.spawn(work)  # type: ignore[arg-type]

    # -- sessions --------

    def _look_at_connection(self, node: int, session: Session) -> None:
        """A session ends with its connection."""
        if session.epoch and (session.connection is None or session.connection.closed):
            self._ended(node, session)

    def _ended(self, node: int, session: Session) -> None:
        session.ended()
        self._book.session_ended(node)

    def _verify_suspects(self, now: float) -> None:
        """Ask about suspect leases as soon as the broker to be asked has a session that will not end them."""
        for partition, ended in list(self._book.suspects.items()):
            node = self._leader_of(partition, now)
            if node is None:
                continue
            session = self._sessions.get(node)
            is_open = session is not None and session.epoch > 0
            if node != ended or is_open:
                native = self._settler.natives.get(node, True)
                self._book.verify(partition, can_renew=native)

    def _can_renew(self, node: int) -> bool:
        session = self._sessions.get(node)
        return session is not None and can_renew(session.connection)

    async def _connect(self, node: int, session: Session) -> Connection:
        connection = await self._cluster.connection(node, self._lane)
        if session.connection is not connection:
            if session.epoch:
                self._ended(node, session)
            session.connection = connection
            self._settler.natives[node] = ApiKey.SETTLE_LEASES in connection.versions
        return connection

    # -- requests --------

    async def _fetch(
        self, node: int, session: Session, partitions: list[TopicPartition], share: int, taken: Said
    ) -> None:
        try:
            response = await self._exchange_fetch(node, session, partitions, share, taken)
        except MansioError as error:
            self._failed(node, session, error)
            self._settler.told_all(taken, error if error.retriable else ConnectionLost(error.message))
        else:
            session.succeeded()
            self._take(node, session, response, taken)
            self._settler.told_all(taken, ConnectionLost("the broker said nothing of a partition"))
        finally:
            session.busy = False
            self._reserved -= share
            self.wake()

    async def _exchange_fetch(
        self, node: int, session: Session, partitions: list[TopicPartition], share: int, taken: Said
    ) -> share_fetch.ShareFetchResponse:
        connection = await self._connect(node, session)
        holds = self._book.held and not self._settler.natives.get(node, True)
        wait_ms = self._options.fetch_wait_ms_max
        return await self._requests.fetch(
            connection,
            session,
            {each: self._assigned[each] for each in partitions if each in self._assigned},
            taken,
            records_max=share,
            wait_ms=min(HOLDING_WAIT_MS, wait_ms) if holds else wait_ms,
        )

    async def _acknowledge(self, node: int, session: Session, taken: Said) -> None:
        try:
            connection = await self._connect(node, session)
            response = await self._requests.acknowledge(connection, session, taken)
        except MansioError as error:
            self._failed(node, session, error)
            self._settler.told_all(taken, error if error.retriable else ConnectionLost(error.message))
        else:
            session.succeeded()
            names = {self._settler.ids[each]: each.topic for each in taken}
            for topic_id, results in response.topics:
                for result in results:
                    partition = TopicPartition(names[topic_id], result.index)
                    code, why = result.error_code, result.error_message
                    refusal = error_for(code, why) if code else None
                    self._settler.told(taken, partition, refusal, response.lock_ms / 1000)
            self._settler.told_all(taken, ConnectionLost("the broker said nothing of a partition"))
        finally:
            session.busy = False
            self.wake()

    # -- answers --------

    def _failed(self, node: int, session: Session, error: MansioError) -> None:
        """The request came to nothing: begin again, soon."""
        if self._is_closed:
            return
        session.failures += 1
        session.blocked_until = self._loop.time() + self._options.backoff.delay_seconds(session.failures)
        if isinstance(error, ShareSessionNotFound | InvalidShareSessionEpoch | ConnectionLost):
            logger.info("share group %s: session with broker %d: %s", self._options.group, node, error)
            if session.epoch:
                self._ended(node, session)
        elif isinstance(error, ShareSessionLimitReached):
            logger.warning("share group %s: broker %d: %s", self._options.group, node, error)
        elif not error.retriable:
            self._fail(error)
        self._look_at_connection(node, session)
        self._cluster.mark_stale({partition.topic for partition in self._assigned})

    def _take(
        self, node: int, session: Session, response: share_fetch.ShareFetchResponse, taken: Said
    ) -> None:
        names = {key: each.topic for each, key in session.known.items()}
        names.update({self._settler.ids[each]: each.topic for each in taken})
        lock_s = response.lock_ms / 1000
        refused: set[TopicPartition] = set()
        for topic_id, partitions in response.topics:
            for data in partitions:
                partition = TopicPartition(names.get(topic_id, ""), data.index)
                if partition in taken:
                    code, message = data.acknowledge_error_code, data.acknowledge_error_message
                    self._settler.told(taken, partition, error_for(code, message) if code else None)
                if not partition.topic:
                    continue
                if data.error_code:
                    refused.add(partition)
                    self._refused(partition, error_for(data.error_code, data.error_message))
                elif data.acquired:
                    self._put_down(partition, node, data, lock_s)

        for partition in session.known.keys() & self._blocked.keys() - refused:
            del self._blocked[partition]

    def _put_down(
        self, partition: TopicPartition, node: int, data: share_fetch.SharePartitionData, lock_s: float
    ) -> None:
        records = data.records[0] if data.records else memoryview(b"")
        try:
            holes = self._book.take(partition, node, records, data.acquired, lock_s)
        except MansioError as error:  # others may be able to read it; if not, it goes to the dead letters
            holes = [(first, last, RELEASE) for first, last, _ in data.acquired]
            self._fail(error)
        for first, last, kind in holes:
            self._settler.say_of_range(partition, kind, first, last)

    def _refused(self, partition: TopicPartition, error: MansioError) -> None:
        """Not from this broker, or not now."""
        if not error.retriable:
            self._fail(error)
        self._cluster.mark_stale((partition.topic,))
        failures = self._blocked.get(partition, (0.0, 0))[1] + 1
        until = self._loop.time() + self._options.backoff.delay_seconds(failures)
        self._blocked[partition] = (until, failures)

    # -- the end --------

    async def end_sessions(self) -> None:
        """Tell every broker: what is still leased is released at once."""
        nodes = [node for node, session in self._sessions.items() if session.epoch]
        await asyncio.gather(*(self._end_session(node) for node in nodes))

    async def _end_session(self, node: int) -> None:
        # Beside the session's own connection, on which a fetch may wait.
        try:
            connection = await self._cluster.connection(node)
            await self._requests.end(connection)
        except MansioError as error:
            logger.info(
                "share group %s: ending the session with broker %d: %s", self._options.group, node, error
            )

    async def close(self) -> None:
        """Stop. What is under way is thrown away."""
        self._is_closed = True
        self._alarm.cancel()
        await self._cluster.close_lane(self._lane)
