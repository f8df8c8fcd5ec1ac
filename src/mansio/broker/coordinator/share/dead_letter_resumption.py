"""In a cluster: dead letters that are on their way go on wherever their share partition is led now, used or not.

Who leads a share partition takes up its dead letters when it loads the state, and it loads the state when somebody uses
the group. So whoever keeps the state looks, now and then, for those on their way, and calls their leaders: a look at
the share partition (DescribeLeases) is enough to have it loaded.

Always true: nothing is written; a call that fails is made again at the next look; one look is under way at a time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from mansio.broker.coordinator.share.gather_results import gather_results
from mansio.errors import MansioError
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mansio.metadata.image import MetadataImage
    from mansio.ports import Peers, Scheduler
    from mansio.state.share_partition.types import ShareKey

CLIENT_ID: Final = "mansio-dead-letters"
TIMEOUT_MS: Final = 5_000


class DeadLetterResumption:
    """See the module. All methods belong to the broker's loop."""

    def __init__(
        self,
        *,
        node_id: int,
        state: MetadataImage,
        peers: Peers,
        scheduler: Scheduler,
        load_partition: Callable[[ShareKey], object],
    ) -> None:
        """`load_partition`: load a share partition that is led here."""
        self._node_id = node_id
        self._state = state
        self._peers = peers
        self._scheduler = scheduler
        self._resume_dead_letters = load_partition
        self._calling = False

    def call(self, keys: Sequence[ShareKey]) -> None:
        """Their dead letters are on their way: have their leaders take them up."""
        if keys and not self._calling:
            self._calling = True
            self._scheduler.spawn(self._call(keys), name="call for dead letters")

    async def _call(self, keys: Sequence[ShareKey]) -> None:
        try:
            works = []
            for (leader, group), found in self._by_leader(keys).items():
                if leader == self._node_id:
                    self._here(found)
                elif leader in self._state.brokers:
                    works.append(self._ask(leader, group, found))
            await gather_results(self._scheduler, works, name="call for dead letters")
        finally:
            self._calling = False

    def _by_leader(self, keys: Sequence[ShareKey]) -> dict[tuple[int, str], list[ShareKey]]:
        found: dict[tuple[int, str], list[ShareKey]] = defaultdict(list)
        for key in keys:
            topic = self._state.topics_by_id.get(UUID(bytes=key.topic_id))
            if topic is not None and key.partition < len(topic.partitions):
                found[topic.partitions[key.partition].leader, key.group].append(key)
        return found

    def _here(self, keys: Sequence[ShareKey]) -> None:
        for key in keys:
            try:
                self._resume_dead_letters(key)
            except MansioError:  # it is led elsewhere by now, or cannot be loaded now
                continue

    async def _ask(self, leader: int, group: str, keys: Sequence[ShareKey]) -> None:
        indexes: dict[bytes, list[int]] = defaultdict(list)
        for key in keys:
            indexes[key.topic_id].append(key.partition)
        fields: dict[str, Any] = {
            "group_id": group,
            "topics": [
                {"topic_id": UUID(bytes=topic), "partitions": each} for topic, each in indexes.items()
            ],
            "spans_max": 0,
        }
        request = messages.encode_request(ApiKey.DESCRIBE_LEASES, 0, 0, CLIENT_ID, fields)
        await self._peers.send(leader, request, timeout_ms=TIMEOUT_MS)
