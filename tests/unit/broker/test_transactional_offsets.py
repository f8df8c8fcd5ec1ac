"""Offsets committed in transactions: who may commit them, when they are visible, and what happens when the coordinator
moves or the transaction ends during a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mansio.api.kafka.handlers import offsets as offset_handlers
from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.broker.routing.caller import ANONYMOUS
from mansio.errors import (
    ConnectionLost,
    CoordinatorLoadInProgress,
    FencedInstanceId,
    IllegalGeneration,
    InconsistentGroupProtocol,
    InvalidProducerIdMapping,
    MansioError,
    NotCoordinator,
    OffsetMetadataTooLarge,
    UnknownMember,
    UnknownTopicOrPartition,
)
from mansio.state.classic_group.types import Join, Protocol, Sync
from mansio.state.consumer_group.types import Heartbeat
from mansio.state.share_group.group import ShareHeartbeat
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.end_marker import EndMarker, encode_end_marker
from mansio.wire.batch.record_batch import read_header
from unit.broker import test_groups
from unit.broker.cluster_fixtures import PARTITIONS, GroupCluster
from unit.broker.consumer_groups_fixtures import ConsumerBroker
from unit.broker.transactional_offsets_fixtures import TOPIC, OffsetsRoom, Verifier

test_groups.GROUP_APIS[ApiKey.TXN_OFFSET_COMMIT] = offset_handlers.txn_offset_commit

PRODUCER = 11


def commit(room: Any, offset: int = 7, *, group: str = "g", producer: int = PRODUCER, **fields: Any) -> Any:
    """Commit the offset of t-0 in a transaction."""
    wanted = {"adds": True, "caller": ANONYMOUS, **fields}
    offsets = [OffsetToCommit(TOPIC, 0, offset)]
    return room.service.commit_offsets_in_transaction("tx", group, producer, 0, offsets, **wanted)


def visible(room: Any, group: str = "g") -> int | None:
    found = room.run(
        room.service.fetch_offsets(group, requires_stable=False, caller=ANONYMOUS)
    ).committed.get((TOPIC, 0))
    return None if found is None else found.offset


def is_unstable(room: Any, group: str = "g") -> bool:
    return (TOPIC, 0) in room.run(room.service.fetch_offsets(group, [(TOPIC, 0)], caller=ANONYMOUS)).unstable


class Members(ConsumerBroker):
    """A room with members."""

    def __init__(self) -> None:
        super().__init__()
        self.service = self.group_service
        self.verifier = self.service.verifier = Verifier()
        self.run = self.scheduler.run
        self.groups.offsets._partition_exists = lambda topic, index: topic == TOPIC and index < 4

    def classic_member(self, instance_id: str | None = None) -> tuple[str, int]:
        """Id and generation of the member of a stable classic group."""
        join = Join("", instance_id, "client", "/host", 10_000, 10_000, "consumer", (Protocol("range", b""),))
        joined = self.run(self.service.join("g", join, caller=ANONYMOUS))
        if joined.must_rejoin:
            joined = self.run(
                self.service.join("g", replace(join, member_id=joined.member_id), caller=ANONYMOUS)
            )
        sync = Sync(joined.member_id, instance_id, joined.generation, {joined.member_id: b""})
        self.run(self.service.sync("g", sync, caller=ANONYMOUS))
        return joined.member_id, joined.generation


# Visibility


def test_an_offset_is_visible_only_after_the_commit_marker() -> None:
    room = OffsetsRoom()
    assert room.run(commit(room)) == [None]
    assert visible(room) is None
    assert is_unstable(room)
    assert room.reported == {}
    room.end("g", PRODUCER)
    assert visible(room) == 7
    assert not is_unstable(room)
    assert room.reported["g", TOPIC, 0].offset == 7


def test_an_aborted_offset_is_never_visible_and_its_group_vanishes() -> None:
    room = OffsetsRoom()
    room.run(room.service.commit_offsets("h", [OffsetToCommit(TOPIC, 0, 1)], caller=ANONYMOUS))
    for group in ("g", "h"):
        room.run(commit(room, group=group))
    room.end("g", PRODUCER, is_commit=False)
    assert (visible(room), visible(room, "h")) == (None, 1)
    assert list(room.groups.store.entries) == ["h"]
    again = room.restarted()
    assert (visible(again), visible(again, "h"), is_unstable(again, "h")) == (None, 1, False)


def test_a_later_commit_outside_of_the_transaction_wins() -> None:
    room = OffsetsRoom()
    room.run(commit(room, 7))
    room.run(room.service.commit_offsets("g", [OffsetToCommit(TOPIC, 0, 3)], caller=ANONYMOUS))
    assert is_unstable(room), "the transaction is still open"
    room.end("g", PRODUCER)
    assert visible(room) == 3
    assert visible(room.restarted()) == 3


def test_of_two_transactions_the_later_record_wins_whatever_the_order_of_the_markers() -> None:
    for first, second in ((1, 2), (2, 1)):
        room = OffsetsRoom()
        room.run(commit(room, 10, producer=1))
        room.run(commit(room, 20, producer=2))
        room.end("g", first)
        assert is_unstable(room)
        room.end("g", second)
        assert visible(room) == 20
        assert visible(room.restarted()) == 20


def test_one_producer_never_ends_the_transaction_of_another() -> None:
    room = OffsetsRoom()
    room.run(commit(room, producer=1))
    room.end("g", 2)
    assert visible(room) is None
    assert is_unstable(room)


def test_without_partitions_only_committed_ones_can_be_unstable() -> None:
    room = OffsetsRoom()
    room.run(commit(room))
    room.run(room.service.commit_offsets("g", [OffsetToCommit(TOPIC, 1, 5)], caller=ANONYMOUS))
    found = room.run(room.service.fetch_offsets("g", caller=ANONYMOUS))
    assert (set(found.committed), found.unstable) == ({(TOPIC, 1)}, frozenset())
    room.run(room.service.commit_offsets("g", [OffsetToCommit(TOPIC, 0, 5)], caller=ANONYMOUS))
    found = room.run(room.service.fetch_offsets("g", caller=ANONYMOUS))
    assert (set(found.committed), found.unstable) == ({(TOPIC, 1)}, {(TOPIC, 0)})


def test_pending_offsets_survive_a_crash_and_a_clean_stop() -> None:
    for is_clean in (False, True):
        room = OffsetsRoom()
        room.run(commit(room))
        again = room.restarted(is_clean=is_clean)
        assert visible(again) is None
        assert is_unstable(again)
        again.end("g", PRODUCER)
        assert visible(again) == 7
        assert visible(again.restarted()) == 7


def test_the_log_has_one_transactional_batch_per_request_with_the_producer() -> None:
    room = OffsetsRoom()
    offsets = [OffsetToCommit(TOPIC, index, index) for index in range(3)]
    room.run(
        room.service.commit_offsets_in_transaction("tx", "g", 5, 2, offsets, adds=True, caller=ANONYMOUS)
    )
    [batch] = room.partitions[0].stored
    header = read_header(batch)
    assert (header.producer_id, header.producer_epoch, header.record_count) == (5, 2, 3)
    assert header.is_transactional
    assert not header.is_control


def test_invalid_offsets_are_refused_one_by_one() -> None:
    room = OffsetsRoom()
    offsets = [
        OffsetToCommit(TOPIC, 0, 7, metadata="x" * 5000),
        OffsetToCommit("none", 0, 7),
        OffsetToCommit(TOPIC, 1, 8),
    ]
    results = room.run(
        room.service.commit_offsets_in_transaction(
            "tx", "g", PRODUCER, 0, offsets, adds=True, caller=ANONYMOUS
        )
    )
    assert [type(each) for each in results] == [OffsetMetadataTooLarge, UnknownTopicOrPartition, type(None)]
    room.end("g", PRODUCER)
    assert set(
        room.run(room.service.fetch_offsets("g", requires_stable=False, caller=ANONYMOUS)).committed
    ) == {(TOPIC, 1)}


# Members


def test_a_producer_that_names_no_member_is_not_fenced() -> None:
    room = Members()
    room.classic_member()
    assert room.run(commit(room)) == [None]


def test_a_fenced_member_of_a_classic_group_cannot_commit() -> None:
    room = Members()
    member, generation = room.classic_member()
    assert room.run(commit(room, member_id=member, generation=generation)) == [None]
    with pytest.raises(IllegalGeneration):
        room.run(commit(room, member_id=member, generation=generation - 1))
    with pytest.raises(IllegalGeneration):
        room.run(commit(room, member_id=member))
    with pytest.raises(UnknownMember):
        room.run(commit(room, member_id="other", generation=generation))
    with pytest.raises(IllegalGeneration):
        room.run(commit(room, group="none", member_id=member, generation=generation))


def test_a_replaced_static_member_cannot_commit() -> None:
    room = Members()
    member, generation = room.classic_member("i")
    assert room.run(commit(room, member_id=member, instance_id="i", generation=generation)) == [None]
    with pytest.raises(FencedInstanceId):
        room.run(commit(room, member_id="old", instance_id="i", generation=generation))


def test_a_fenced_member_of_a_consumer_group_cannot_commit() -> None:
    room = Members()
    joined = room.run(
        room.service.consumer_heartbeat(
            "g",
            Heartbeat("m", 0, rebalance_timeout_ms=10_000, topic_names=("t",), owned=frozenset()),
            caller=ANONYMOUS,
        )
    )
    epoch = joined.member_epoch
    assert room.run(commit(room, member_id="m", generation=epoch)) == [None]
    assert room.run(commit(room)) == [None]
    for stale in (epoch - 1, epoch + 1):
        with pytest.raises(IllegalGeneration):
            room.run(commit(room, member_id="m", generation=stale))
    with pytest.raises(UnknownMember):
        room.run(commit(room, member_id="other", generation=epoch))


def test_a_share_group_has_no_offsets_and_a_group_with_pending_ones_becomes_no_share_group() -> None:
    room = Members()
    heartbeat = ShareHeartbeat("m", 0, topic_names=("t",))
    room.run(room.service.share_heartbeat("s", heartbeat, caller=ANONYMOUS))
    with pytest.raises(InconsistentGroupProtocol):
        room.run(commit(room, group="s"))
    room.run(commit(room))
    with pytest.raises(MansioError):
        room.run(room.service.share_heartbeat("g", heartbeat, caller=ANONYMOUS))


# Verification


@pytest.mark.parametrize("adds", [False, True])
def test_the_partition_of_the_group_is_verified_once_per_transaction(adds: bool) -> None:
    room = OffsetsRoom(4)
    for _ in range(3):
        room.run(commit(room, adds=adds))
    index = 103 % 4  # "g" is 103 in Java's string hash
    asked = ("tx", PRODUCER, 0, (("__consumer_offsets", index),), adds)
    assert room.verifier.asked == [asked]
    room.end("g", PRODUCER)
    room.run(commit(room, adds=adds))
    assert room.verifier.asked == [asked] * 2


class _Concurrent(MansioError):
    kafka_code = 51
    retriable = True


@pytest.mark.parametrize(
    ("error", "adds", "expected"),
    [
        (InvalidProducerIdMapping(), True, InvalidProducerIdMapping),
        (NotCoordinator(), True, CoordinatorLoadInProgress),
        (ConnectionLost(), False, CoordinatorLoadInProgress),
        (_Concurrent(), True, _Concurrent),
        (_Concurrent(), False, CoordinatorLoadInProgress),
    ],
)
def test_nothing_is_appended_when_the_verification_fails(
    error: MansioError,
    adds: bool,
    expected: type[MansioError],
) -> None:
    room = OffsetsRoom()
    room.verifier.error = error
    for room.verifier.raises in (False, True):
        with pytest.raises(expected):
            room.run(commit(room, adds=adds))
    assert room.partitions[0].stored == []


def test_a_transaction_that_ends_during_its_verification_gets_no_record() -> None:
    room = OffsetsRoom()
    room.verifier.on_verify = lambda: room.end("g", PRODUCER, is_commit=False)
    with pytest.raises(CoordinatorLoadInProgress):
        room.run(commit(room))
    assert not is_unstable(room)
    room.verifier.on_verify = lambda: room.end("g", PRODUCER + 1)
    assert room.run(commit(room)) == [None]


def test_no_record_follows_a_marker_that_is_not_committed_yet() -> None:
    room = OffsetsRoom()
    room.run(commit(room))
    room.groups.offsets.expect_marker(room.index_of("g"), PRODUCER)
    marker = room.write_marker(room.index_of("g"), PRODUCER, 0, is_commit=True)
    room.verifier.error = InvalidProducerIdMapping()
    with pytest.raises(InvalidProducerIdMapping):
        room.run(commit(room, 9))
    assert is_unstable(room)
    room.verifier.error = None
    room.verifier.on_verify = lambda: room.groups.offsets.expect_marker(room.index_of("g"), PRODUCER)
    with pytest.raises(CoordinatorLoadInProgress):
        room.run(commit(room, 9))
    room.groups.offsets.apply_marker(room.index_of("g"), marker)
    assert visible(room) == 7


# Deletion and expiry


def test_a_deleted_group_takes_its_pending_offsets_with_it() -> None:
    room = OffsetsRoom()
    room.run(commit(room))
    assert room.run(room.service.delete(["g"], caller=ANONYMOUS)) == [None]
    for each in (room, room.restarted()):
        each.end("g", PRODUCER)
        assert visible(each) is None
        assert each.groups.store.entries == {}


def test_deleted_offsets_do_not_come_back_with_the_commit() -> None:
    room = OffsetsRoom()
    room.run(room.service.commit_offsets("g", [OffsetToCommit(TOPIC, 1, 1)], caller=ANONYMOUS))
    room.run(commit(room))
    assert room.run(room.service.delete_offsets("g", [(TOPIC, 0)], caller=ANONYMOUS)) == [None]
    assert not is_unstable(room)
    for each in (room, room.restarted()):
        each.end("g", PRODUCER)
        assert visible(each) is None


def test_offsets_of_a_deleted_topic_do_not_come_back_and_those_of_a_new_one_stay() -> None:
    room = OffsetsRoom()
    room.run(commit(room))
    deletion = room.groups.offsets.delete_offsets_of_topic(TOPIC)
    room.run(commit(room, 9))  # for a new topic with the same name
    room.run(deletion)
    assert is_unstable(room)
    room.run(room.groups.offsets.delete_offsets_of_topic(TOPIC))
    room.end("g", PRODUCER)
    assert visible(room) is None


def test_an_open_transaction_keeps_offset_and_group_from_expiring() -> None:
    room = OffsetsRoom(offsets_retention_ms=1000)
    room.run(room.service.commit_offsets("g", [OffsetToCommit(TOPIC, 0, 1)], caller=ANONYMOUS))
    room.run(commit(room))
    room.run(commit(room, group="h"))
    room.scheduler.pass_time(5000)
    assert room.run(room.groups.offset_expiration.expire()) == 0
    assert visible(room) == 1
    assert is_unstable(room, "h")
    room.end("g", PRODUCER, is_commit=False)
    assert room.run(room.groups.offset_expiration.expire()) == 1
    assert room.groups.store.entries == {}


# A cluster


class Cluster(GroupCluster):
    def __init__(self) -> None:
        super().__init__()
        brokers: list[Any] = list(self.brokers.values())
        for broker in brokers:
            broker.group_service.verifier = Verifier()
            broker.service, broker.run = broker.group_service, self.scheduler.run
        self.made()
        self.home = 103 % PARTITIONS

    @property
    def leader_broker(self) -> Any:
        return self.brokers[self.leaders[self.home]]

    def write_marker(self, *, is_commit: bool = True) -> EndMarker:
        marker = EndMarker(PRODUCER, 0, is_commit, 1)
        self.partitions[self.home].append(encode_end_marker(marker, 0), internal=True)
        return marker

    def move_to_next(self) -> None:
        self.move(self.home, self.leaders[self.home] % 3 + 1)
        self.tell(self.home)


def test_the_next_leader_knows_the_pending_offsets_and_the_former_one_serves_none() -> None:
    cluster = Cluster()
    former = cluster.leader_broker
    cluster.scheduler.run(commit(former))
    cluster.move_to_next()
    cluster.scheduler.turn()
    broker = cluster.leader_broker
    assert is_unstable(broker)
    with pytest.raises(NotCoordinator):
        cluster.scheduler.run(commit(former))
    marker = cluster.write_marker()
    former.groups.offsets.apply_marker(cluster.home, marker)
    assert visible(broker) is None
    broker.groups.offsets.apply_marker(cluster.home, marker)
    assert visible(broker) == 7


def test_a_broker_that_leads_again_remembers_nothing_of_its_former_leadership() -> None:
    cluster = Cluster()
    first = cluster.leader_broker
    cluster.scheduler.run(commit(first))
    cluster.move_to_next()
    cluster.scheduler.turn()
    cluster.leader_broker.groups.offsets.apply_marker(cluster.home, cluster.write_marker(is_commit=False))
    for _ in range(2):
        cluster.move_to_next()
        cluster.scheduler.turn()
    assert cluster.leader_broker is first
    assert not is_unstable(first)
    assert not first.groups.store.has_open_transaction(cluster.home, PRODUCER, 0)
    assert first.groups.store.first_pending_offset(cluster.home) is None


def test_a_marker_that_is_committed_during_a_load_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load has read the end of the log, and has not applied everything, when the marker is appended."""
    cluster = Cluster()
    cluster.scheduler.run(commit(cluster.leader_broker))
    other = [OffsetToCommit(TOPIC, 1, 1)]
    cluster.scheduler.run(cluster.leader_broker.service.commit_offsets("g", other, caller=ANONYMOUS))
    cluster.move_to_next()
    broker = cluster.leader_broker
    apply = broker.groups.store.apply

    def end_and_apply(*record: Any) -> None:
        broker.groups.offsets.apply_marker(cluster.home, cluster.write_marker())
        apply(*record)

    monkeypatch.setattr(broker.groups.store, "apply", end_and_apply)
    cluster.scheduler.turn()
    monkeypatch.undo()
    assert visible(broker) == 7
    assert not is_unstable(broker)
    cluster.move_to_next()
    cluster.scheduler.turn()
    assert visible(cluster.leader_broker) == 7


# Requests


def txn_fields(version: int, **fields: Any) -> dict[str, Any]:
    partitions = [{"partition_index": index, "committed_offset": 40 + index} for index in (0, 1, 9)]
    member = {"member_id": "", "generation_id": -1} if version >= 3 else {}
    topics = [{"name": "t", "partitions": partitions}]
    identity = {"transactional_id": "tx", "group_id": "g", "producer_id": PRODUCER, "producer_epoch": 0}
    return {**identity, **member, "topics": topics, **fields}


@pytest.mark.parametrize("version", range(6))
def test_every_version_commits_and_only_5_adds_the_partition(version: int) -> None:
    room = Members()
    answer = room.call(ApiKey.TXN_OFFSET_COMMIT, version, **txn_fields(version))
    assert [each.error_code for each in answer.topics[0].partitions] == [0, 0, 3]
    assert [each[-1] for each in room.verifier.asked] == [version >= 5]


def test_the_member_is_checked_from_version_3_on() -> None:
    room = Members()
    member, generation = room.classic_member()
    for version in (3, 5):
        fields = txn_fields(version, member_id=member, generation_id=generation - 1)
        answer = room.call(ApiKey.TXN_OFFSET_COMMIT, version, **fields)
        assert {each.error_code for each in answer.topics[0].partitions} == {22}
        fields["generation_id"] = generation
        answer = room.call(ApiKey.TXN_OFFSET_COMMIT, version, **fields)
        assert answer.topics[0].partitions[0].error_code == 0


class _Abortable(MansioError):
    kafka_code = 120


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (NotCoordinator(), {0: 15, 1: 15, 2: 14, 5: 14}),
        (_Abortable(), {0: 48, 3: 48, 4: 120, 5: 120}),
        (_Concurrent(), {1: 15, 4: 14, 5: 51}),
    ],
)
def test_old_versions_get_errors_that_they_know(error: MansioError, codes: dict[int, int]) -> None:
    room = Members()
    room.verifier.error = error
    for version, expected in codes.items():
        answer = room.call(ApiKey.TXN_OFFSET_COMMIT, version, **txn_fields(version))
        assert {each.error_code for each in answer.topics[0].partitions} == {expected}, version


@pytest.mark.parametrize("version", [6, 7, 8, 9])
@pytest.mark.parametrize("require_stable", [False, True])
def test_a_fetch_of_stable_offsets_reports_unstable_partitions(
    version: int,
    require_stable: bool,
) -> None:
    room = Members()
    room.run(
        room.service.commit_offsets("g", [OffsetToCommit("t", each, 3) for each in (0, 1)], caller=ANONYMOUS)
    )
    room.run(commit(room))
    topics = [{"name": "t", "partition_indexes": [0, 1]}]
    fields: dict[str, Any] = {"groups": [{"group_id": "g", "topics": topics}]}
    if version < 8:
        fields = {"group_id": "g", "topics": topics}
    if version >= 7:
        fields["require_stable"] = require_stable
    answer = room.call(ApiKey.OFFSET_FETCH, version, **fields)
    found = (answer.groups[0] if version >= 8 else answer).topics[0].partitions
    unstable = (88, -1) if require_stable and version >= 7 else (0, 3)
    assert [(each.error_code, each.committed_offset) for each in found] == [unstable, (0, 3)]
