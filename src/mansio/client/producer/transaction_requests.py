"""Requests of a transactional producer to its coordinator and to the coordinators of groups.

InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn, DescribeTransactions. Retriable errors are
retried up to a timeout; the other ones are raised. `TransactionManager` has the state; this class applies to it only
the responses about initialization and added partitions.

Invariant: after an error of `end`, `may_be_ended` is whether its request may have been processed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mansio.errors import (
    ConnectionLost,
    CoordinatorNotAvailable,
    MansioError,
    NotCoordinator,
    RebalanceInProgress,
    RequestTimedOut,
)
from mansio.net.cluster import TRANSACTION_KEY_TYPE, check_top_level_error, group_by_topic
from mansio.net.retry import raise_for_code
from mansio.wire.api_versions import ApiKey
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mansio.client.producer.transaction_manager import TransactionManager
    from mansio.net.cluster import Cluster
    from mansio.net.connection import BrokerConnection

FEATURE: Final = "transaction.version"
CHANNEL: Final = "transactions"
"""Channel of the connections to coordinators: a commit that waits for the disk delays no heartbeat."""
HIGHEST_VERSIONS_BEFORE_BUMPS: Final = {ApiKey.END_TXN: 4, ApiKey.TXN_OFFSET_COMMIT: 4}
"""Highest version of an API that a cluster with a lower `transaction.version` accepts (KIP-890)."""
ADD_PARTITIONS_VERSION_MAX: Final = 3
"""Highest version of AddPartitionsToTxn for clients; later ones are for brokers."""

DESCRIBE_TIMEOUT_MS: Final = 5_000
"""How long the reason of a refusal is looked for."""
ABORTED_STATES: Final = ("PrepareAbort", "CompleteAbort", "PrepareEpochFence")

STALE_COORDINATOR_ERRORS: Final = (NotCoordinator, CoordinatorNotAvailable, ConnectionLost, RequestTimedOut)


class GroupMemberIdentity(NamedTuple):
    """A member of a group, as it commits offsets. `generation`: or member epoch, -1 without membership."""

    group: str
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


class TransactionRequests:
    """Sends the requests of one transactional id."""

    def __init__(self, cluster: Cluster, manager: TransactionManager, *, retry_timeout_ms: float) -> None:
        self.manager = manager
        self._cluster = cluster
        self._retry_timeout_ms = retry_timeout_ms
        self.may_be_ended: bool = False
        """Whether a request of the last call of `end` may have been processed although it raised an error."""

    async def initialize(self, timeout_ms: int) -> None:
        """Initialize the producer: fences others with the transactional id and aborts an open transaction.

        `timeout_ms`: after which the coordinator aborts a transaction. Raises `InvalidTransactionTimeout`,
        `ProducerFenced`."""
        manager = self.manager
        known = manager.identity
        fields = {
            "transactional_id": manager.transactional_id,
            "transaction_timeout_ms": timeout_ms,
            "producer_id": known.producer_id,
            "producer_epoch": known.first_epoch,
        }
        version = 0

        async def attempt(connection: BrokerConnection) -> Any:
            nonlocal version
            version = connection.features.get(FEATURE, 0)
            response = await connection.request(ApiKey.INIT_PRODUCER_ID, fields)
            check_top_level_error(response)
            return response

        response = await self._request_own_coordinator(attempt)
        manager.on_initialized(response.producer_id, response.producer_epoch, transaction_version=version)

    async def add_partitions(self) -> None:
        """Add the missing partitions to the transaction, for brokers that do not add them with the first batch."""
        identity = self.manager.identity
        added = set(self.manager.missing_partitions)
        topics = group_by_topic(TopicPartition(*each) for each in sorted(added))
        fields = {f"v3_and_below_{name}": value for name, value in self._identity_fields().items()} | {
            "v3_and_below_topics": [
                {"name": topic, "partitions": list(indexes)} for topic, indexes in topics.items()
            ]
        }

        async def attempt(connection: BrokerConnection) -> None:
            version = connection.version_for(ApiKey.ADD_PARTITIONS_TO_TXN, highest=ADD_PARTITIONS_VERSION_MAX)
            response = await connection.request(ApiKey.ADD_PARTITIONS_TO_TXN, fields, version=version)
            for topic in response.results_by_topic_v3_and_below:
                for result in topic.results_by_partition:
                    raise_for_code(result.partition_error_code)

        await self._request_own_coordinator(attempt)
        if self.manager.identity is identity:  # otherwise the transaction was aborted meanwhile
            self.manager.on_partitions_added(added)

    async def commit_offsets(
        self, member: GroupMemberIdentity, offsets: Mapping[TopicPartition, int]
    ) -> None:
        """Commit offsets of a group as a part of the transaction. Raises `IllegalGeneration`, `UnknownMember`,
        `RebalanceInProgress` or a similar error if the group has rebalanced without this member."""
        if self.manager.add_group(member.group):
            await self._add_offsets(member.group)
        fields = self._identity_fields() | {
            "group_id": member.group,
            "generation_id": member.generation,
            "member_id": member.member_id,
            "group_instance_id": member.instance_id,
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": index,
                            "committed_offset": offsets[TopicPartition(topic, index)],
                            "committed_leader_epoch": -1,
                            "committed_metadata": "",
                        }
                        for index in indexes
                    ],
                }
                for topic, indexes in group_by_topic(offsets).items()
            ],
        }

        async def attempt() -> None:
            try:
                connection = await self._cluster.coordinator(member.group)
                version = self._version(connection, ApiKey.TXN_OFFSET_COMMIT)
                response = await connection.request(ApiKey.TXN_OFFSET_COMMIT, fields, version=version)
                for topic in response.topics:
                    for result in topic.partitions:
                        raise_for_code(result.error_code)
            except STALE_COORDINATOR_ERRORS:
                self._cluster.forget_coordinator(member.group)
                raise

        await self._cluster.retry(
            attempt, timeout_ms=self._retry_timeout_ms, not_retried=(RebalanceInProgress,)
        )

    async def _add_offsets(self, group: str) -> None:
        fields = self._identity_fields() | {"group_id": group}

        async def attempt(connection: BrokerConnection) -> None:
            check_top_level_error(await connection.request(ApiKey.ADD_OFFSETS_TO_TXN, fields))

        await self._request_own_coordinator(attempt)

    async def end(self, *, is_commit: bool, retry_timeout_ms: float) -> tuple[int, int]:
        """Commit or abort the transaction. Returns producer id and epoch of the next one, -1 without a bump.

        The request is repeated until it is answered: the coordinator recognizes a repeated one by its epoch. If it
        raises an error, `may_be_ended` is whether the coordinator may have decided nevertheless."""
        self.may_be_ended = False
        fields = self._identity_fields() | {"committed": is_commit}

        async def attempt(connection: BrokerConnection) -> tuple[int, int]:
            version = self._version(connection, ApiKey.END_TXN)
            was_sent, self.may_be_ended = self.may_be_ended, True
            try:
                response = await connection.request(ApiKey.END_TXN, fields, version=version)
                check_top_level_error(response)
            except MansioError as error:
                if not error.retriable:  # refused: this attempt has changed nothing
                    self.may_be_ended = was_sent
                raise
            return response.producer_id, response.producer_epoch

        ended: tuple[int, int] = await self._request_own_coordinator(
            attempt, retry_timeout_ms=retry_timeout_ms
        )
        return ended

    async def is_timed_out(self) -> bool:
        """Whether the coordinator has aborted the transaction of this producer because of its timeout, and no other
        producer has used the transactional id since. False if that cannot be found out."""
        known = self.manager.identity
        fields = {"transactional_ids": [self.manager.transactional_id]}

        async def attempt(connection: BrokerConnection) -> Any:
            response = await connection.request(ApiKey.DESCRIBE_TRANSACTIONS, fields)
            (described,) = response.transaction_states
            raise_for_code(described.error_code)
            return described

        try:
            described = await self._request_own_coordinator(attempt, retry_timeout_ms=DESCRIBE_TIMEOUT_MS)
        except MansioError:
            return False
        return (
            described.producer_id == known.producer_id
            and described.producer_epoch == known.first_epoch + 1
            and described.transaction_state in ABORTED_STATES
        )

    # -- helpers --------

    def _identity_fields(self) -> dict[str, Any]:
        manager = self.manager
        return {
            "transactional_id": manager.transactional_id,
            "producer_id": manager.identity.producer_id,
            "producer_epoch": manager.identity.first_epoch,
        }

    def _version(self, connection: BrokerConnection, api_key: ApiKey) -> int:
        highest = None if self.manager.bumps_epoch else HIGHEST_VERSIONS_BEFORE_BUMPS[api_key]
        return connection.version_for(api_key, highest=highest)

    async def _request_own_coordinator(
        self, attempt: Callable[[BrokerConnection], Any], *, retry_timeout_ms: float | None = None
    ) -> Any:
        transactional_id = self.manager.transactional_id

        async def attempt_once() -> Any:
            try:
                connection = await self._cluster.coordinator(
                    transactional_id, CHANNEL, key_type=TRANSACTION_KEY_TYPE
                )
                return await attempt(connection)
            except STALE_COORDINATOR_ERRORS:
                self._cluster.forget_coordinator(transactional_id, key_type=TRANSACTION_KEY_TYPE)
                raise

        return await self._cluster.retry(
            attempt_once,
            timeout_ms=self._retry_timeout_ms if retry_timeout_ms is None else retry_timeout_ms,
        )
