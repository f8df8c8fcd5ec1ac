"""Appends of this broker to partitions that it, or another broker of the cluster, leads.

Invariant: an append succeeds only when the batch is committed, as with acks=all. A batch is appended only to the topic
with the given topic id, never to a new topic of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from mansio.errors import LeaderNotAvailable, MansioError, NotLeaderOrFollower
from mansio.net.retry import client_error_for_code
from mansio.ports import complete, complete_with_error, result_within
from mansio.tracebacks import copied, result_of
from mansio.wire.apis import produce
from mansio.wire.field_values import ACKS_ALL

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Peers, Promise, Scheduler

WRITE_TIMEOUT_MS: Final = 10_000
PRODUCE_VERSION: Final = 13
DUPLICATE_SEQUENCE: Final = 46


class LedPartition(NamedTuple):
    """A partition to which this broker appends. It may be led by another one."""

    topic: str
    topic_id: bytes
    partition: int


class LeaderAppends:
    """Appends and requests to the leaders of partitions. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        client_id: str,
        peers: Peers | None = None,
    ) -> None:
        """`client_id`: in the requests to other brokers; `peers`: None on a single node."""
        self._node_id = node_id
        self._topics = topics
        self._partitions = partitions
        self._scheduler = scheduler
        self._client_id = client_id
        self._peers = peers

    async def append(self, target: LedPartition, data: bytes) -> None:
        """Append a batch and return when it is committed, by this append or an earlier one.

        Raises the error of the append, or one of the errors of a timeout or a lost connection, after which it is
        unknown whether the batch was appended."""
        leader = self.leader_of(target)
        if leader is None:
            partition = self.local_partition(target)
            appended = await self._append_locally(partition, data)
            await self.wait_with_timeout(partition.commit_promise(appended.end_offset), partition.name)
            return
        topics = [(None, target.topic_id, [(target.partition, data)])]
        request = b"".join(
            produce.encode_request(PRODUCE_VERSION, 0, self._client_id, ACKS_ALL, WRITE_TIMEOUT_MS, topics)
        )
        response = produce.decode_response(PRODUCE_VERSION, await self.send(leader, request))
        for _, _, results in response.topics:
            for result in results:
                if result.error_code not in (0, DUPLICATE_SEQUENCE):
                    raise client_error_for_code(result.error_code, result.error_message)

    async def _append_locally(self, partition: Partition, data: bytes) -> AppendResult:
        """Append the batch on this broker with the topic's `compression.type`, like a batch of a client."""
        promise: Promise[AppendResult] = self._scheduler.promise()

        def on_appended(outcome: AppendResult | MansioError) -> None:
            if isinstance(outcome, MansioError):
                complete_with_error(promise, copied(outcome))
            else:
                complete(promise, outcome)

        self._partitions.batch_processor.append(partition, data, urgent=True, on_appended=on_appended)
        return await result_of(promise)

    def leader_of(self, target: LedPartition) -> int | None:
        """Return the node id of the partition's leader, None if this broker is the leader. Raises `UnknownTopicId`,
        `LeaderNotAvailable`."""
        topic = self._topics.find_by_id(UUID(bytes=target.topic_id))
        leader = topic.partitions[target.partition].leader
        if leader == self._node_id or self._peers is None:
            return None
        if leader < 0:
            raise LeaderNotAvailable(f"no leader for {target.topic}-{target.partition}")
        return leader

    def local_partition(self, target: LedPartition) -> Partition:
        """Return the partition, which this broker leads. Raises `NotLeaderOrFollower`."""
        partition = self._partitions.find(None, target.topic_id, target.partition)
        partition.ensure_leader()
        return partition

    async def send(self, node_id: int | None, request: bytes) -> bytes:
        """Send a request to a leader, and return the response."""
        if node_id is None or self._peers is None:
            raise NotLeaderOrFollower("the leader of the partition has moved")
        return await self._peers.send(node_id, request, timeout_ms=2 * WRITE_TIMEOUT_MS)

    async def wait_with_timeout(self, promise: Promise[Any], name: str) -> None:
        """Wait for the promise of a commit for at most `WRITE_TIMEOUT_MS`; then raise `RequestTimedOut`."""
        late = f"{name}: not committed within {WRITE_TIMEOUT_MS // 1000} s"
        await result_within(self._scheduler, promise, WRITE_TIMEOUT_MS, late)
