"""The requests of a share session: fetch, acknowledge, end (KIP-932).

Owns the way from what a receiver wants and says to bytes, and from answers to what they say. Always true: what a
request changes of a session is put down when its answer is there, and not before; an error at an answer's top is
raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.client.share.leased import RENEW
from mansio.client.share.pending_ack import merge_contiguous
from mansio.errors import ConnectionLost, UnsupportedVersion
from mansio.net.retry import raise_for
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import share_acknowledge, share_fetch
from mansio.wire.apis.share_acknowledge import AckBatch, AckPartition
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from mansio.client.share.pending_ack import PendingAcks
    from mansio.client.tasks import Reply
    from mansio.net.connection import Connection

    TopicIds = dict[TopicPartition, bytes]

FINAL_EPOCH: Final = -1
EPOCH_MAX: Final = 2**31 - 1


class ShareSession:
    """With one broker. `epoch`: what the next request carries, 0 for a new session."""

    __slots__ = ("blocked_until", "busy", "connection", "epoch", "failures", "known", "names")

    def __init__(self) -> None:
        self.epoch = 0
        self.connection: Connection | None = None
        self.known: TopicIds = {}
        """Its partitions, as the broker knows them, and the ids of their topics."""
        self.names: dict[bytes, str] = {}
        """Its topics by their ids."""
        self.busy = False
        self.failures = 0
        self.blocked_until = 0.0

    def succeeded(self) -> None:
        """A request was answered."""
        self.epoch = self.epoch + 1 if self.epoch < EPOCH_MAX else 1
        self.failures = 0

    def ended(self) -> None:
        """The next request opens a new one."""
        self.epoch = 0
        self.connection = None
        self.knows({})

    def knows(self, partitions: TopicIds) -> None:
        """These are its partitions now."""
        if partitions is not self.known:
            self.known = partitions
            self.names = {key: each.topic for each, key in partitions.items()}


class ShareRequests:
    """Writes and reads those of one member. `ids`: of every topic that it ever leased records of."""

    def __init__(self, group: str, member_id: str, ids: TopicIds, *, bytes_max: int) -> None:
        self._group = group
        self._member_id = member_id
        self._ids = ids
        self._bytes_max = bytes_max

    def begin_fetch(
        self,
        connection: Connection,
        session: ShareSession,
        wanted: TopicIds,
        taken: PendingAcks,
        *,
        records_max: int,
        wait_ms: int,
        reply: Reply,
    ) -> TopicIds:
        """Ask for so many records of these partitions, and say what was taken along; `reply` is for `read_fetch`, with
        the partitions of the session from then on. With `records_max` 0 the session is opened, and nothing is waited
        for."""
        if taken and not session.epoch:
            raise ConnectionLost("the share session ended")
        known = session.known
        added, gone, then = wanted, dict[TopicPartition, bytes](), wanted
        if wanted == known:
            added, then = {}, known
        elif known:
            added = {each: key for each, key in wanted.items() if known.get(each) != key}
            if records_max:
                gone = {each: key for each, key in known.items() if wanted.get(each) != key}
            then = {each: key for each, key in known.items() if each not in gone} | wanted
        version = connection.version_for(ApiKey.SHARE_FETCH)
        correlation_id = connection.next_correlation_id()
        framed = share_fetch.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._group,
            self._member_id,
            session.epoch,
            self._topics(added, taken),
            max_wait_ms=wait_ms if records_max else 0,
            min_bytes=1 if records_max else 0,
            max_bytes=self._bytes_max if records_max else 0,
            max_records=records_max,
            batch_size=records_max,
            acquire_mode=share_fetch.RECORD_LIMIT,
            forgotten=_forgotten(gone) if session.epoch else (),
        )
        timeout_ms = connection.options.request_timeout_ms + wait_ms
        connection.begin((framed,), correlation_id, reply, timeout_ms=timeout_ms)
        return then

    def read_fetch(
        self, connection: Connection, session: ShareSession, then: TopicIds, frame: bytes
    ) -> share_fetch.ShareFetchResponse:
        """The answer."""
        response = share_fetch.decode_response(connection.version_for(ApiKey.SHARE_FETCH), frame)
        raise_for(response.error_code, response.error_message)
        session.knows(then)
        return response

    async def acknowledge(
        self, connection: Connection, session: ShareSession, taken: PendingAcks
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        """Say what was taken along, and nothing else."""
        if not session.epoch:
            raise ConnectionLost("the share session ended")
        return await self._acknowledge(connection, session.epoch, taken)

    async def end(self, connection: Connection) -> None:
        """End the session; what the member has leased of this broker is released."""
        await self._acknowledge(connection, FINAL_EPOCH, {})

    async def _acknowledge(
        self, connection: Connection, epoch: int, taken: PendingAcks
    ) -> share_acknowledge.ShareAcknowledgeResponse:
        version = connection.version_for(ApiKey.SHARE_ACKNOWLEDGE)
        correlation_id = connection.next_correlation_id()
        framed = share_acknowledge.encode_request(
            version,
            correlation_id,
            connection.options.client_id,
            self._group,
            self._member_id,
            epoch,
            self._topics({}, taken),
            is_renew_ack=has(taken, RENEW),
        )
        frame = await connection.exchange((framed,), correlation_id)
        response = share_acknowledge.decode_response(version, frame)
        raise_for(response.error_code, response.error_message)
        return response

    def _topics(self, added: TopicIds, taken: PendingAcks) -> list[tuple[bytes, list[AckPartition]]]:
        """Partitions for the session, and what is said of leases."""
        found: dict[bytes, list[AckPartition]] = {}
        for partition in dict.fromkeys([*added, *taken]):
            batches = [
                AckBatch(run[0].first, run[-1].last, bytes((run[0].kind,)))
                for run in merge_contiguous(taken.get(partition, []))
            ]
            key = added.get(partition) or self._ids[partition]
            found.setdefault(key, []).append(AckPartition(partition.partition, batches))
        return list(found.items())


def has(taken: PendingAcks, kind: int) -> bool:
    """Is anything of this kind said?"""
    return any(pending.kind == kind for each in taken.values() for pending in each)


def can_renew(connection: Connection | None) -> bool:
    """Does the broker extend leases when a session asks for it (KIP-1222)?"""
    try:
        return (
            connection is not None
            and connection.version_for(ApiKey.SHARE_ACKNOWLEDGE) >= share_acknowledge.RENEWALS
        )
    except UnsupportedVersion:
        return False


def _forgotten(gone: TopicIds) -> list[tuple[bytes, list[int]]]:
    found: dict[bytes, list[int]] = {}
    for partition, topic_id in gone.items():
        found.setdefault(topic_id, []).append(partition.partition)
    return list(found.items())
