"""Lease forwarder: requests of this broker to others that lead share partitions or coordinate their group, for clients
of protocols in which every broker answers.

Requests with small responses and those for records use the connections of two request classes. A wait for records
leases none, so all callers that wait for the same share one request, which is this broker's own. All others are
forwarded with the id and the address of their caller.

Invariants:
* A request is sent once, to one broker, which does not forward it.
* Waits are bounded, so that they leave room for other requests on their connection.
* Every request has a time limit.
* An error says whether it is unknown what the request has done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.coordinator.share.received_records import ReceivedRecord, ReceiveResult
from mansio.broker.routing.routes import available_leader
from mansio.errors import (
    BrokerUnreachable,
    ConnectionLost,
    LeaderNotAvailable,
    MansioError,
    RequestTimedOut,
    Unavailable,
    error_for_code,
)
from mansio.ports import complete, complete_with_error
from mansio.tracebacks import copied, result_of, without_traceback
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import acknowledge_records
from mansio.wire.apis.acknowledge_records import AcknowledgeBatch
from mansio.wire.codec import messages
from mansio.wire.framing import LENGTH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mansio.broker.routing.caller import Caller
    from mansio.metadata.image import MetadataImage
    from mansio.ports import ForwardingPeers, Promise, Scheduler
    from mansio.state.share_partition.types import AcknowledgementBatch

WAITS_CLIENT_ID: Final = "mansio-forwarded"
"""Client id of the waits for records, which are no client's."""

WAITS_MAX: Final = 192
"""Maximum number of requests in progress to each broker that wait for records."""

WOKEN_MAX: Final = 4
"""Maximum number of waiting callers that one response with available records wakes."""

WAIT_MS: Final = 5_000
"""Duration of such a request."""

FORWARDING_TIMEOUT_MS: Final = 10_000
"""Time after which a request that does not wait for records has failed."""

TopicIndex = tuple[str, int]
"""Topic and partition."""

_WaitKey = tuple[int, str, frozenset[str]]
"""Broker, group and topics."""


class LeaseForwarder:
    """Sends requests about leases to other brokers. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        broker_epoch: Callable[[], int],
        state: MetadataImage,
        peers: ForwardingPeers,
        data_peers: ForwardingPeers,
        scheduler: Scheduler,
    ) -> None:
        """`peers`: connections to other brokers for small responses; `data_peers`: for responses with records."""
        self.node_id = node_id
        self._broker_epoch = broker_epoch
        self._state = state
        self._peers = peers
        self._data_peers = data_peers
        self._scheduler = scheduler
        self._waits: dict[_WaitKey, list[Promise[bool]]] = {}
        """Callers of each request in progress that waits for records."""

    # ------------------------------------------------------------------ leaders

    def partitions_by_leader(self, topics: Collection[str]) -> dict[int, list[TopicIndex]]:
        """Return the partitions of topics by the node id of their leader, this broker included; partitions without a
        leader are left out."""
        found: dict[int, list[TopicIndex]] = {}
        for name in topics:
            topic = self._state.topics.get(name)
            for index, partition in enumerate(() if topic is None else topic.partitions):
                if available_leader(self._state, partition) is not None:
                    found.setdefault(partition.leader, []).append((name, index))
        return found

    def other_leader(self, topic_id: bytes, index: int) -> int | None:
        """Return the node id of the leader of a partition if it is another broker. Raises `LeaderNotAvailable` if no
        broker leads it."""
        topic = self._state.topics_by_id.get(UUID(bytes=topic_id))
        if topic is None or index >= len(topic.partitions):
            return None  # this broker knows the right error
        leader = available_leader(self._state, topic.partitions[index])
        if leader is None:
            raise LeaderNotAvailable(f"{topic.name}-{index} has no leader")
        return None if leader.node_id == self.node_id else leader.node_id

    @property
    def other_brokers(self) -> list[int]:
        """Node ids of the other brokers with a session."""
        return [node_id for node_id in self._state.brokers if node_id != self.node_id]

    # ------------------------------------------------------------------ requests

    async def receive(
        self,
        node_id: int,
        group_id: str,
        topics: Collection[str],
        *,
        member_id: str,
        max_records: int,
        max_bytes: int,
        lease_ms: int,
        caller: Caller,
        timeout_ms: float,
    ) -> ReceiveResult:
        """Lease available records of partitions that a broker leads, as `ReceiveService.receive_records` does there.

        Raises its errors, and `ConnectionLost` if there is no answer; its leases have to be released then."""
        fields = {
            "group_id": group_id,
            "member_id": member_id,
            "topics": list(topics),
            "records_max": max_records,
            "bytes_max": max_bytes,
            "wait_ms": 0,
            "lease_ms": lease_ms,
        }
        response = await self._send(
            node_id, ApiKey.RECEIVE_RECORDS, fields, timeout_ms, caller, self._data_peers
        )
        records: list[ReceivedRecord] = []
        errors: dict[TopicIndex, MansioError] = {}
        for part in response.partitions:
            if part.error_code:
                errors[part.topic, part.partition_index] = error_for_code(
                    part.error_code, part.error_message or ""
                )
            records += [
                ReceivedRecord(
                    part.topic,
                    part.topic_id,
                    part.partition_index,
                    each.offset,
                    each.delivery_count,
                    each.timestamp_ms,
                    each.key,
                    each.value,
                    [(header.name, header.value) for header in each.headers],
                )
                for each in part.records
            ]
        return ReceiveResult(member_id, records, response.lock_ms, errors, response.throttle_time_ms)

    def may_wait(self, node_id: int, group_id: str, topics: Collection[str]) -> bool:
        """Whether `wait_for_records` can be called: there are not too many requests that wait."""
        if (node_id, group_id, frozenset(topics)) in self._waits:
            return True
        return sum(key[0] == node_id for key in self._waits) < WAITS_MAX

    async def wait_for_records(self, node_id: int, group_id: str, topics: Collection[str]) -> bool:
        """Wait until records of the partitions that a broker leads may be available, for at most about `WAIT_MS`;
        return whether they may. Raises the errors of `ReceiveService.wait_for_records`, and `ConnectionLost`."""
        key = node_id, group_id, frozenset(topics)
        callers = self._waits.get(key)
        if callers is None:
            callers = self._waits[key] = []
            self._scheduler.spawn(self._send_waits(key, callers), name="wait for records")
        promise: Promise[bool] = self._scheduler.promise()
        callers.append(promise)
        try:
            return await result_of(promise)
        finally:
            if promise in callers:
                callers.remove(promise)

    async def _send_waits(self, key: _WaitKey, callers: list[Promise[bool]]) -> None:
        """Send requests that wait as long as there are callers. If records are available, at most `WOKEN_MAX` callers
        are woken, so that a single record does not lead to a request of every caller."""
        node_id, group_id, topics = key
        fields = {
            "group_id": group_id,
            "member_id": "",
            "topics": sorted(topics),
            "records_max": 0,
            "bytes_max": 0,
            "wait_ms": WAIT_MS,
        }
        error: MansioError | None = None
        try:
            while callers:
                response = await self._send(
                    node_id, ApiKey.RECEIVE_RECORDS, fields, WAIT_MS + FORWARDING_TIMEOUT_MS, None
                )
                woken = callers[:WOKEN_MAX] if response.is_available else callers[:]
                del callers[: len(woken)]
                for promise in woken:
                    complete(promise, response.is_available)
        except MansioError as failure:
            error = without_traceback(failure)
        finally:
            del self._waits[key]
            for promise in callers:
                complete_with_error(
                    promise, copied(error) if error else Unavailable("the wait for records was interrupted")
                )

    async def release(self, node_id: int, group_id: str, member_id: str, caller: Caller) -> None:
        """Release all leases of a member on a broker. Raises `ConnectionLost`."""
        fields = {"group_id": group_id, "member_id": member_id}
        await self._send(node_id, ApiKey.RELEASE_LEASES, fields, FORWARDING_TIMEOUT_MS, caller)

    async def register(self, node_id: int, group_id: str, topics: Collection[str], caller: Caller) -> None:
        """Create a share group at its coordinator, as `LeaseService.register` does there. Raises its errors and
        `ConnectionLost`."""
        fields = {"group_id": group_id, "topics": list(topics)}
        await self._send(node_id, ApiKey.REGISTER_SHARE_GROUP, fields, FORWARDING_TIMEOUT_MS, caller)

    async def acknowledge(
        self,
        node_id: int,
        group_id: str,
        member_id: str,
        topic_id: bytes,
        index: int,
        batches: Sequence[AcknowledgementBatch],
        caller: Caller,
    ) -> MansioError | None:
        """Acknowledge records of one partition that a broker leads; return the error of the partition, None if all were
        acknowledged. Raises `ConnectionLost` if it is unknown whether they were."""
        encoded = [
            AcknowledgeBatch(
                each.first, each.last, each.types[0], each.delay_ms, each.reason, each.delivery_count
            )
            for each in batches
        ]
        request = acknowledge_records.encode_request(
            0, caller.client_id, group_id, member_id, [(topic_id, [(index, encoded)])]
        )
        answer = await self._exchange(node_id, request, FORWARDING_TIMEOUT_MS, caller, is_own=False)
        response = acknowledge_records.decode_response(answer)
        if response.error_code:
            return error_for_code(response.error_code, response.error_message or "")
        (result,) = response.results
        return error_for_code(result.error_code, result.error_message or "") if result.error_code else None

    async def _send(
        self,
        node_id: int,
        key: ApiKey,
        fields: dict[str, Any],
        timeout_ms: float,
        caller: Caller | None,
        peers: ForwardingPeers | None = None,
    ) -> Any:
        """Return the response to a request for `caller`, None for this broker; raise its error."""
        sender = {"node_id": self.node_id, "broker_epoch": self._broker_epoch()}
        client_id = WAITS_CLIENT_ID if caller is None else caller.client_id
        request = messages.encode_request(key, 0, 0, client_id, sender | fields)
        answer = await self._exchange(node_id, request, timeout_ms, caller, peers, is_own=True)
        _, response = messages.decode_response_frame(key, 0, answer)
        if response.error_code:
            raise error_for_code(response.error_code, response.error_message or "")
        return response

    async def _exchange(
        self,
        node_id: int,
        request: bytes,
        timeout_ms: float,
        caller: Caller | None,
        peers: ForwardingPeers | None = None,
        *,
        is_own: bool,
    ) -> bytes:
        """Return the answer of a broker. `is_own`: whether clients may not send the request. Raises `BrokerUnreachable`
        if nothing was sent, `ConnectionLost` if there is no answer."""
        peers = peers or self._peers
        try:
            if caller is None:
                return await peers.send(node_id, request, timeout_ms=timeout_ms)
            answer = await peers.forward(
                node_id,
                request[LENGTH_BYTES:],
                client=caller.forwarded,
                is_own=is_own,
                timeout_ms=timeout_ms,
            )
            return answer.response
        except BrokerUnreachable as error:
            raise BrokerUnreachable(
                f"broker {node_id}, which is responsible, cannot be reached; nothing was changed "
                f"({error.message})"
            ) from error
        except (ConnectionLost, RequestTimedOut) as error:
            raise ConnectionLost(
                f"broker {node_id}, which is responsible, did not answer: it is unknown what the request has "
                f"done ({error.message})"
            ) from error
