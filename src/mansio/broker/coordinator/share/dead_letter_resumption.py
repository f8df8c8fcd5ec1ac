"""Resumption of waiting dead letters in a cluster, also of groups that no member uses.

The leader of a share partition resumes its dead letters when it loads the share state, which it does when a member
uses the group. The broker that keeps the share state therefore checks periodically for waiting dead letters and sends
a DescribeLeases request to the leader of their share partition; the leader loads the state to answer it.

Invariants: no state is changed; a failed request is repeated at the next check; one check at a time is in flight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.coordinator.share.dead_letter_topics import DEAD_LETTERS_CLIENT_ID
from mansio.broker.routing.routes import available_leader
from mansio.errors import MansioError
from mansio.host.gather_results import gather_results
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.metadata.image import MetadataImage
    from mansio.ports import Peers, Scheduler
    from mansio.state.share_partition.types import ShareKey

RESUMPTION_TIMEOUT_MS: Final = 5_000


class DeadLetterResumption:
    """Makes the leaders of share partitions resume dead letters. All methods run on the broker's event loop."""

    def __init__(
        self,
        *,
        node_id: int,
        state: MetadataImage,
        peers: Peers,
        scheduler: Scheduler,
        load_partition: Callable[[ShareKey], object],
    ) -> None:
        """`load_partition`: loads the state of a share partition that this broker leads."""
        self._node_id = node_id
        self._state = state
        self._peers = peers
        self._scheduler = scheduler
        self._load_partition = load_partition
        self._is_resuming = False

    def resume(self, keys: Sequence[ShareKey]) -> None:
        """Start to make the leaders of these share partitions resume their dead letters; no effect while the last call
        is in progress."""
        if keys and not self._is_resuming:
            self._is_resuming = True
            self._scheduler.spawn(self._resume(keys), name="resume dead letters")

    async def _resume(self, keys: Sequence[ShareKey]) -> None:
        try:
            requests = []
            for (leader, group), found in self._group_by_leader(keys).items():
                if leader == self._node_id:
                    self._load_locally(found)
                else:
                    requests.append(self._send_describe_leases(leader, group, found))
            await gather_results(self._scheduler, requests, name="resume dead letters")
        finally:
            self._is_resuming = False

    def _group_by_leader(self, keys: Sequence[ShareKey]) -> dict[tuple[int, str], list[ShareKey]]:
        found: dict[tuple[int, str], list[ShareKey]] = defaultdict(list)
        for key in keys:
            topic = self._state.topics_by_id.get(UUID(bytes=key.topic_id))
            if topic is None or key.partition >= len(topic.partitions):
                continue
            leader = available_leader(self._state, topic.partitions[key.partition])
            if leader is not None:
                found[leader.node_id, key.group].append(key)
        return found

    def _load_locally(self, keys: Sequence[ShareKey]) -> None:
        for key in keys:
            try:
                self._load_partition(key)
            except MansioError:  # it is led by another broker, or cannot be loaded now
                continue

    async def _send_describe_leases(self, leader: int, group: str, keys: Sequence[ShareKey]) -> None:
        indexes: dict[bytes, list[int]] = defaultdict(list)
        for key in keys:
            indexes[key.topic_id].append(key.partition)
        fields: dict[str, Any] = {
            "group_id": group,
            "topics": [
                {"topic_id": UUID(bytes=topic), "partitions": each} for topic, each in indexes.items()
            ],
            "ranges_max": 0,
        }
        request = messages.encode_request(ApiKey.DESCRIBE_LEASES, 0, 0, DEAD_LETTERS_CLIENT_ID, fields)
        await self._peers.send(leader, request, timeout_ms=RESUMPTION_TIMEOUT_MS)
