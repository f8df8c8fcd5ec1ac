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
    UnsupportedVersion,
)
from mansio.link.alarm import Alarm
from mansio.link.retry import error_for
from mansio.wire import share_acknowledge, share_fetch
from mansio.wire.share_acknowledge import AckBatch, AckPartition
from mansio.wire.topic_partition import TopicPartition
from mansio.wire.versions import ApiKey

from .leaders import Leaders
from .leased_types import RELEASE, RENEW
from .settles import runs_of
from .tasks import client_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.link.cluster import Cluster
    from mansio.link.connection import Connection

    from .lease_book import LeaseBook
    from .leased_types import ReceiveOptions
    from .settles import Said, Settler
    from .tasks import Tasks

    Known = dict[TopicPartition, bytes]

logger = logging.getLogger(__name__)

FINAL_EPOCH: Final = -1
EPOCH_MAX: Final = 2**31 - 1
HOLDING_WAIT_MS: Final = 100
"""How long a fetch may wait where acknowledgements wait behind it."""

_LANES = itertools.count()


class Session:
    """With one broker. `epoch`: what the next request carries, 0 for a new session."""

    __slots__ = ("blocked_until", "busy", "connection", "epoch", "failures", "known", "must_open")

    def __init__(self) -> None:
        self.epoch = 0
        self.connection: Connection | None = None
        self.known: Known = {}
        self.busy = False
        self.failures = 0
        self.blocked_until = 0.0
        self.must_open = False
        """Something waits for it, though there is nothing to fetch."""


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
        self._member_id = member_id
        self._book = book
        self._settler = settler
        self._tasks = tasks
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._leaders = settler.leaders = Leaders(cluster, tasks, self.wake, refreshes=False)
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
            blocked = self._blocked.get(partition)
            if blocked is not None and blocked[0] > now:
                self._alarm.set(blocked[0])
                continue
            node = self._leaders.find(*partition, now)
            if node is None:
                self._leaders.look_up(*partition, partial(self._refused, partition))
            else:
                found.setdefault(node, []).append(partition)
        return found

    @property
    def _room(self) -> int:
        """How many records may be asked for now."""
        book, most = self._book, self._options.max_records
        if self._is_paused or book.ready_bytes >= self._options.prefetch_bytes_max:
            return 0
        return min(most - (book.held - book.settling), 2 * most - book.held) - self._reserved

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
            if _has(taken, RENEW) or (taken and not share):
                self._spawn(self._acknowledge(node, session, taken), session, 0)
            elif share or (not is_open and (session.must_open or (node in waiting and not native))):
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
        session.epoch = 0
        session.connection = None
        session.known = {}
        self._book.session_ended(node)
        session.must_open = bool(self._book.suspects)

    def _verify_suspects(self, now: float) -> None:
        """Ask about suspect leases as soon as the broker to be asked has a session that will not end them."""
        for partition, ended in list(self._book.suspects.items()):
            node = self._leaders.find(*partition, now)
            if node is None:
                self._leaders.look_up(
                    *partition, lambda error: logger.info("looking for a leader: %s", error)
                )
                continue
            session = self._sessions.get(node)
            is_open = session is not None and session.epoch > 0
            if node != ended or is_open:
                native = self._settler.natives.get(node, True)
                self._book.verify(partition, can_renew=native)

    def _can_renew(self, node: int) -> bool:
        session = self._sessions.get(node)
        if session is None or session.connection is None:
            return False
        return _version(session.connection, ApiKey.SHARE_ACKNOWLEDGE) >= share_acknowledge.RENEWALS

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
            self._succeeded(session)
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
        if taken and not session.epoch:
            raise ConnectionLost("the share session ended")
        wanted = {each: self._assigned[each] for each in partitions if each in self._assigned}
        added = {each: key for each, key in wanted.items() if session.known.get(each) != key}
        gone = {each: key for each, key in session.known.items() if wanted.get(each) != key} if share else {}
        version = connection.version_for(ApiKey.SHARE_FETCH)
        holds = self._book.held and not self._settler.natives.get(node, True)
        wait_ms = (
            min(HOLDING_WAIT_MS, self._options.fetch_wait_ms_max)
            if holds
            else self._options.fetch_wait_ms_max
        )
        correlation_id = connection.next_correlation_id()
        framed = share_fetch.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._options.group,
            self._member_id,
            session.epoch,
            self._topics(added, taken),
            max_wait_ms=wait_ms if share else 0,
            min_bytes=1 if share else 0,
            max_bytes=self._options.fetch_bytes_max if share else 0,
            max_records=share,
            batch_size=share,
            acquire_mode=share_fetch.RECORD_LIMIT,
            forgotten=_forgotten(gone) if session.epoch else (),
        )
        timeout_ms = connection.options.request_timeout_ms + wait_ms
        frame = await connection.exchange((framed,), correlation_id, timeout_ms=timeout_ms)
        response = share_fetch.decode_response(version, frame)
        if response.error_code:
            raise error_for(response.error_code, response.error_message)
        session.known = {each: key for each, key in session.known.items() if each not in gone} | wanted
        return response

    async def _acknowledge(self, node: int, session: Session, taken: Said) -> None:
        try:
            response = await self._exchange_acknowledge(node, session, taken)
        except MansioError as error:
            self._failed(node, session, error)
            self._settler.told_all(taken, error if error.retriable else ConnectionLost(error.message))
        else:
            self._succeeded(session)
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

    async def _exchange_acknowledge(
        self, node: int, session: Session, taken: Said
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        connection = await self._connect(node, session)
        if not session.epoch:
            raise ConnectionLost("the share session ended")
        version = connection.version_for(ApiKey.SHARE_ACKNOWLEDGE)
        correlation_id = connection.next_correlation_id()
        framed = share_acknowledge.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._options.group,
            self._member_id,
            session.epoch,
            self._topics({}, taken),
            is_renew_ack=_has(taken, RENEW),
        )
        frame = await connection.exchange((framed,), correlation_id)
        response = share_acknowledge.decode_response(version, frame)
        if response.error_code:
            raise error_for(response.error_code, response.error_message)
        return response

    def _topics(self, added: Known, taken: Said) -> list[tuple[bytes, list[AckPartition]]]:
        """Partitions for the session, and what is said of leases."""
        found: dict[bytes, list[AckPartition]] = {}
        for partition in dict.fromkeys([*added, *taken]):
            batches = [
                AckBatch(run[0].first, run[-1].last, bytes((run[0].kind,)))
                for run in runs_of(taken.get(partition, []))
            ]
            key = added.get(partition) or self._settler.ids[partition]
            found.setdefault(key, []).append(AckPartition(partition.partition, batches))
        return list(found.items())

    # -- answers --------

    def _succeeded(self, session: Session) -> None:
        session.epoch = session.epoch + 1 if session.epoch < EPOCH_MAX else 1
        session.failures = 0
        session.must_open = False

    def _failed(self, node: int, session: Session, error: MansioError) -> None:
        """The request came to nothing: begin again, soon."""
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
        for topic_id, partitions in response.topics:
            for data in partitions:
                partition = TopicPartition(names.get(topic_id, ""), data.index)
                if partition in taken:
                    code, message = data.acknowledge_error_code, data.acknowledge_error_message
                    self._settler.told(taken, partition, error_for(code, message) if code else None)
                if data.error_code:
                    self._refused(partition, error_for(data.error_code, data.error_message))
                elif data.acquired and partition.topic:
                    self._blocked.pop(partition, None)
                    self._put_down(partition, node, data, lock_s)

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
            version = connection.version_for(ApiKey.SHARE_ACKNOWLEDGE)
            correlation_id = connection.next_correlation_id()
            framed = share_acknowledge.encode_request(
                version,
                correlation_id,
                connection.options.client_id,
                self._options.group,
                self._member_id,
                FINAL_EPOCH,
                [],
            )
            await connection.exchange((framed,), correlation_id)
        except MansioError as error:
            logger.info(
                "share group %s: ending the session with broker %d: %s", self._options.group, node, error
            )

    async def close(self) -> None:
        """Stop. What is under way is thrown away."""
        self._is_closed = True
        self._alarm.cancel()
        await self._cluster.close_lane(self._lane)


def _has(taken: Said, kind: int) -> bool:
    return any(said.kind == kind for each in taken.values() for said in each)


def _version(connection: Connection, api_key: int) -> int:
    try:
        return connection.version_for(api_key)
    except UnsupportedVersion:
        return -1


def _forgotten(gone: Known) -> list[tuple[bytes, list[int]]]:
    found: dict[bytes, list[int]] = {}
    for partition, topic_id in gone.items():
        found.setdefault(topic_id, []).append(partition.partition)
    return list(found.items())
