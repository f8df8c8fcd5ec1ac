"""Committed offsets of the source's groups, translated and committed on the target.

Invariants:
* An offset is committed only if it is not less than the group's offset on the target, and only while the group has no
  members there: the broker refuses a commit without a member otherwise.
* An offset that does not change is committed again every `RENEWAL_INTERVAL_S`: the target deletes the offsets of a
  group without members after a time, and the group may be needed there much later.
* An offset never passes a copy that the group has not read on the source. A group that is ahead of the mirror gets the
  end of the copies, and more later.
* Not translated: offsets of pipelines (groups `mansio.pipeline.*`), and share groups, which have no committed offsets.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from mansio.errors import MansioError
from mansio.logs import fields
from mansio.net.offsets import CommittedOffset, commit_offsets, fetch_offsets, list_offsets
from mansio.pipelines.group_listing import list_group_ids
from mansio.pipelines.mirroring.offset_map import NO_OFFSET
from mansio.pipelines.mirroring.state_topic import MirroredPartition
from mansio.wire.field_values import EARLIEST_TIMESTAMP
from mansio.wire.internal_records.hold_metadata import pipeline_name_of
from mansio.wire.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mansio.pipelines.mirroring.state_topic import PartitionState
    from mansio.spark.sync_client import SyncClient
    from mansio.wire.codec.messages import Struct

logger = logging.getLogger(__name__)

COMMIT_TIMEOUT_MS: Final = 10_000
RENEWAL_INTERVAL_S: Final = 600.0
NOT_TRANSLATED_TYPES: Final = ("share", "streams")


class GroupOffsets:
    """Translates the offsets of groups, again and again. `groups`: only these; empty: all that have offsets in the
    mirrored topics."""

    def __init__(self, source: SyncClient, target: SyncClient, groups: Sequence[str] = ()) -> None:
        self._source, self._target, self._groups = source, target, groups
        self._committed: dict[tuple[str, TopicPartition], int] = {}
        """Offsets that need no request before the next renewal: those that were committed, or found on the target."""
        self._renewed_s = time.monotonic()

    def synchronize(
        self, topics: Mapping[str, str], states: Mapping[MirroredPartition, PartitionState]
    ) -> int:
        """Translate and commit; returns the number of offsets that have changed. `topics`: target topic of each source
        topic. A group whose offsets cannot be committed is logged, and tried again the next time. Raises the
        errors of the source."""
        committed = 0
        if time.monotonic() - self._renewed_s >= RENEWAL_INTERVAL_S:
            self._committed.clear()
            self._renewed_s = time.monotonic()
        for group in self._groups or self._source.run(list_group_ids(self._source.cluster, _is_translated)):
            found = self._source.run(fetch_offsets(self._source.cluster, group))
            wanted: dict[TopicPartition, CommittedOffset] = {}
            for (topic, partition), offset in found.items():
                if topic not in topics:
                    continue
                place = TopicPartition(topics[topic], partition)
                state = states.get(MirroredPartition(topic, place.topic, partition))
                translated = None if state is None else state.map.translate(offset.offset)
                if translated is not None and translated > self._committed.get((group, place), -1):
                    wanted[place] = CommittedOffset(translated, offset.metadata)
            if wanted:
                committed += self._commit(group, wanted)
        return committed

    def _commit(self, group: str, wanted: dict[TopicPartition, CommittedOffset]) -> int:
        forward: dict[TopicPartition, CommittedOffset] = {}
        unchanged: dict[TopicPartition, CommittedOffset] = {}
        try:
            run, cluster = self._target.run, self._target.cluster
            starts = run(list_offsets(cluster, dict.fromkeys(wanted, EARLIEST_TIMESTAMP)))
            before = run(fetch_offsets(cluster, group, wanted))
            for place, offset in wanted.items():
                known = before[place].offset if place in before else NO_OFFSET
                valid = CommittedOffset(max(offset.offset, starts[place].offset), offset.metadata)
                if known < offset.offset:
                    forward[place] = valid
                elif known == offset.offset:
                    unchanged[place] = valid
            run(commit_offsets(cluster, group, forward | unchanged, retry_timeout_ms=COMMIT_TIMEOUT_MS))
        except MansioError as error:
            logger.info("mirror_group_not_translated", extra=fields(group=group, error=error.message))
            if forward or not unchanged:
                return 0
        self._committed |= {(group, place): offset.offset for place, offset in wanted.items()}
        return len(forward)


def _is_translated(group: Struct) -> bool:
    return (
        pipeline_name_of(group.group_id) is None
        and (getattr(group, "group_type", "") or "").lower() not in NOT_TRANSLATED_TYPES
    )
