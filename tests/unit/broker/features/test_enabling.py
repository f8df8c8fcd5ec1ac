"""Features that a topic with records gets: what was stored stays as it is, on each replica and after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.features.deduplication.deduplicator import ID_READER, Deduplicator
from mansio.broker.features.delays.delay_manager import DELAY_READER, DelayManager
from mansio.broker.features.feature_ports import FeaturePorts
from mansio.broker.features.known_features import create_features
from mansio.broker.features.priorities.priority_view import PRIORITY_READER, PriorityView
from mansio.config import topic_config
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import LARGE_RULES, SMALL_SEGMENTS, PartitionBench
from support.present import present

if TYPE_CHECKING:
    from mansio.broker.partition.partition import Partition

ENABLED: Any = {
    "deduplication": ({"mansio.dedup.ms": "2000000"}, ID_READER, (b"mansio-dedup-id", b"pay-1")),
    "delays": ({"mansio.delay.enable": "true"}, DELAY_READER, (b"mansio-delay-ms", b"60000")),
    "priorities": ({"mansio.priority.enable": "true"}, PRIORITY_READER, (b"mansio-priority", b"high")),
}
"""By the name of the feature: settings of the topic, what is read from batches, and a header."""


def known_of(partition: Partition, feature: str) -> list[Any]:
    """What a replica knows of its records: ids with their offsets, pending records, or priorities that are not 1."""
    if feature == "deduplication":
        window = present(partition.find_feature(Deduplicator)).view.window
        return [one.offset for part in window.select(-1, 1 << 62) for one in part]
    if feature == "delays":
        pending = present(partition.find_feature(DelayManager)).view.pending
        return [record.id for record in pending.select(0, 1 << 62)]
    index = present(partition.find_feature(PriorityView)).index
    assert index.end == partition.end_offset
    return [part.first for part in index.split(0, index.end - 1) if part.number]


class Replica(PartitionBench):
    """A replica on a broker that knows all features."""

    def __init__(self, feature: str, disk: Any = None, *, is_follower: bool, is_enabled: bool) -> None:
        texts, reader, _ = ENABLED[feature]
        rules = LARGE_RULES._replace(readers=(reader,)) if is_enabled else LARGE_RULES
        super().__init__(
            disk,
            settings=(),
            seconds=1_000,
            rules=rules,
            log_settings=SMALL_SEGMENTS,
            is_follower=is_follower,
        )
        ports = FeaturePorts(self.disk, self.background, self.scheduler, self.clock)
        features = create_features(ports)
        for one in features:
            one.close()
        self.open_partition(texts if is_enabled else {}, features=features)
        if is_follower:
            self.partition.become_follower(2, 5)
        self.scheduler.run()

    def enable(self, feature: str) -> None:
        """Apply the changed settings of the topic."""
        texts, reader, _ = ENABLED[feature]
        settings = topic_config.resolve_topic_settings(texts, {}, 1)
        rules = self.partition.rules._replace(readers=(reader,))
        self.partition.apply_settings(settings, rules)
        self.scheduler.run()

    def copy_from(self, leader: Replica) -> None:
        """Append the rest of the leader's log."""
        leader.flush()
        end = self.log.end_offset
        records = b"".join(leader.log.batches(end))
        self.partition.append_from_leader(memoryview(records), 0)
        self.flush()
        self.partition.update_from_leader(self.log.durable_end_offset, 0)
        self.scheduler.run()

    def restarted(self, feature: str) -> Replica:
        self.flush()
        self.partition.close()
        self.log.close()
        return Replica(feature, self.disk, is_follower=self.is_follower, is_enabled=True)


@pytest.mark.parametrize("feature", ENABLED)
def test_enabling_a_feature_leaves_stored_records_as_they_are(feature: str) -> None:
    _, _, (name, value) = ENABLED[feature]
    batch = build_batch([(1_000_000, None, b"v", [(name.decode(), value)])])
    leader = Replica(feature, is_follower=False, is_enabled=False)
    follower = Replica(feature, is_follower=True, is_enabled=False)
    old = leader.partition.append(batch).base_offset
    follower.copy_from(leader)
    for replica in (leader, follower):
        replica.enable(feature)
        assert known_of(replica.partition, feature) == []
        assert replica.visible() == {old: b"v"}

    sent = leader.partition.append(batch)
    assert not sent.duplicate
    assert sent.base_offset > old
    follower.copy_from(leader)
    replicas = [leader, follower, leader.restarted(feature), follower.restarted(feature)]
    known = [known_of(replica.partition, feature) for replica in replicas[2:]]
    assert known == [[sent.base_offset]] * 2
    assert old in replicas[2].visible()
    is_visible = feature != "delays"
    assert [sent.base_offset in replica.visible() for replica in replicas[2:]] == [is_visible] * 2
    again = replicas[2].partition.append(batch)
    assert (again.base_offset == sent.base_offset) is (feature == "deduplication")
