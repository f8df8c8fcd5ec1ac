"""How to consume: what `Client.consume` was asked for, checked once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mansio.client.consumer.batch_decoder import BATCH_BYTES_MAX
from mansio.client.consumer.fetcher import FetchOptions
from mansio.client.group.classic_member import GroupOptions
from mansio.client.types import TopicPartition
from mansio.net.offsets import READ_COMMITTED, READ_UNCOMMITTED

if TYPE_CHECKING:
    from datetime import datetime

    from mansio.client.types import StartAt

RebalanceCallback = Callable[[list[TopicPartition]], Awaitable[object] | object]
"""Called with the partitions that were given or taken; awaited when it returns an awaitable."""


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How to consume; see `Client.consume` for the meaning."""

    group: str | None = None
    from_: StartAt | Mapping[TopicPartition, int] = "earliest"
    to_time: datetime | int | None = None
    to_end: bool = False
    max_records: int | None = None
    auto_commit: bool | None = None
    """None: with a group."""
    auto_commit_interval_ms: float = 5_000
    revoke_timeout_ms: float = 3_000
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    on_out_of_range: Literal["earliest", "latest", "error"] = "earliest"
    on_assigned: RebalanceCallback | None = None
    on_revoked: RebalanceCallback | None = None
    on_lost: RebalanceCallback | None = None
    fetch_wait_ms_max: int = 500
    prefetch_bytes_max: int = 32 << 20
    partition_bytes_max: int = 1 << 20
    batch_bytes_max: int = BATCH_BYTES_MAX
    """A batch that becomes larger than this when it is decompressed is `InvalidRecord`."""
    unknown_topic_ms_max: float = 30_000
    """How long a topic may be unknown to the cluster before a reader without membership is told."""
    membership: GroupOptions = field(default_factory=GroupOptions)

    def __post_init__(self) -> None:
        if self.auto_commit and self.group is None:
            raise ValueError("auto_commit needs a group")
        if self.max_records is not None and self.max_records < 0:
            raise ValueError("max_records must not be negative")

    @property
    def commits_automatically(self) -> bool:
        """Whether what is done with is committed without being asked."""
        return self.group is not None if self.auto_commit is None else self.auto_commit

    def fetching(self, *, is_member: bool = False) -> FetchOptions:
        """How to fetch. `is_member`: what is read changes with the group, which notices itself when a topic is gone."""
        committed = self.isolation == "read_committed"
        return FetchOptions(
            wait_ms_max=self.fetch_wait_ms_max,
            partition_bytes_max=self.partition_bytes_max,
            prefetch_bytes_max=self.prefetch_bytes_max,
            isolation_level=READ_COMMITTED if committed else READ_UNCOMMITTED,
            on_out_of_range=self.on_out_of_range,
            unknown_ms_max=None if is_member else self.unknown_topic_ms_max,
        )
