"""Membership and administration of share groups on a whole broker, by the wire, and what outlives a restart of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.config.config_def import Change, Operation
from mansio.errors import (
    FencedMemberEpoch,
    GroupIdNotFound,
    GroupMaxSizeReached,
    InconsistentGroupProtocol,
    InvalidRecordState,
    InvalidRequest,
    NonEmptyGroup,
    UnknownMember,
    UnknownTopicOrPartition,
)
from mansio.metadata.topic_plan import NewTopic
from mansio.state.share_partition.types import ACCEPT, ShareKey
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis.share_acknowledge import AckBatch
from mansio.wire.batch.record_batch import build_batch
from support.waiting import eventually
from unit.broker.share_fixtures import Peer, ShareBench, part_of, run

if TYPE_CHECKING:
    from pathlib import Path


async def beat(
    peer: Peer, epoch: int, topics: list[str] | None = None, member: str | None = None, group: str = "g"
) -> Any:
    fields = {
        "group_id": group,
        "member_id": peer.member if member is None else member,
        "member_epoch": epoch,
        "subscribed_topic_names": topics,
    }
    return await peer.call_and_rearm(ApiKey.SHARE_GROUP_HEARTBEAT, 1, fields)


async def joined(peer: Peer, *topics: str) -> int:
    answer = await beat(peer, 0, list(topics))
    assert answer.error_code == 0, answer.error_message
    return int(answer.member_epoch)


def assigned(answer: Any) -> dict[bytes, list[int]] | None:
    if answer.assignment is None:
        return None
    return {each.topic_id: each.partitions for each in answer.assignment.topic_partitions}


async def begin_early(room: ShareBench) -> None:
    assert room.service.group_configs is not None
    change = Change("share.auto.offset.reset", Operation.SET, "earliest")
    await room.service.group_configs.alter("g", [change])


def test_members_come_and_go_and_are_described(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        await room.service.topics.create(NewTopic("u", 3, 1))
        u = room.service.topics.find("u").topic_id.bytes
        one, two = await room.peer("m1"), await room.peer("m2")
        first = await beat(one, 0, ["t", "u", "not there"])
        assert assigned(first) == {room.topic_id: [0], u: [0, 1, 2]}
        assert first.heartbeat_interval_ms == 5000
        assert assigned(await beat(one, first.member_epoch)) is None, "nothing new"
        assert (await beat(one, first.member_epoch + 7)).error_code == FencedMemberEpoch.kafka_code
        assert (await beat(two, 1)).error_code == UnknownMember.kafka_code
        assert (await beat(two, 0, [], member="")).error_code == InvalidRequest.kafka_code
        await joined(two, "u")
        named = ["g", "nobody"] * 2  # a name is short, and the answer is not: each is described once
        fields = {"group_ids": named, "include_authorized_operations": False}
        described, missing = (await one.call_and_rearm(ApiKey.SHARE_GROUP_DESCRIBE, 1, fields)).groups
        assert missing.error_code == GroupIdNotFound.kafka_code
        assert (described.group_state, described.assignor_name) == ("Stable", "simple")
        assert [(each.member_id, each.subscribed_topic_names) for each in described.members] == [
            ("m1", ["not there", "t", "u"]),
            ("m2", ["u"]),
        ]
        listed = await one.call_and_rearm(
            ApiKey.LIST_GROUPS, 5, {"states_filter": [], "types_filter": ["Share"]}
        )
        assert [(each.group_id, each.group_type, each.group_state) for each in listed.groups] == [
            ("g", "share", "Stable")
        ]
        for peer in (one, two):
            assert (await beat(peer, -1)).member_epoch == -1
        (described, _) = (await one.call_and_rearm(ApiKey.SHARE_GROUP_DESCRIBE, 1, fields)).groups
        assert (described.group_state, described.members) == ("Empty", [])

    run(check, tmp_path)


def test_partitions_added_to_a_topic_are_read_from_their_beginning(tmp_path: Path) -> None:
    """The group begins at the end of what it never read; what is written before its members know of a partition that
    was added is for it all the same."""

    async def check(room: ShareBench) -> None:
        peer = await room.peer()
        epoch = await joined(peer, "t")
        await room.write(3)
        share_partition = room.service.share_partition_manager.find_one(ShareKey("g", room.topic_id, 0))
        assert (await share_partition.wait_until_loaded()).ranges.start == 3, (
            "a topic that is new to it: from its end"
        )
        await room.service.topics.add_partitions("t", 2)
        added = room.service.partitions.find("t", None, 1)
        batch = build_batch([(room.service.clock.wall_ms(), None, b"early", ())])
        await added.commit_promise(added.append(batch).end_offset)
        answer = await beat(peer, epoch)
        assert answer.error_code == 0
        share_partition = room.service.share_partition_manager.find_one(ShareKey("g", room.topic_id, 1))
        assert (await share_partition.wait_until_loaded()).ranges.start == 0

    run(check, tmp_path)


def test_a_group_is_of_one_kind(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await room.peer()
        await joined(peer, "t")
        consumer = {
            "group_id": "g",
            "member_id": "c",
            "member_epoch": 0,
            "rebalance_timeout_ms": 1000,
            "subscribed_topic_names": ["t"],
            "topic_partitions": [],
        }
        answer = await peer.call_and_rearm(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, consumer)
        assert answer.error_code == InconsistentGroupProtocol.kafka_code
        classic = {
            "group_id": "g",
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 10_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        }
        answer = await peer.call_and_rearm(ApiKey.JOIN_GROUP, 5, classic)
        assert answer.error_code == InconsistentGroupProtocol.kafka_code
        asked = {"group_id": "g", "member_id": "m", "generation_id": 1}
        assert (
            await peer.call_and_rearm(ApiKey.HEARTBEAT, 3, asked)
        ).error_code == InconsistentGroupProtocol.kafka_code
        partition = {"partition_index": 0, "committed_offset": 1}
        commit = {
            "group_id": "g",
            "member_id": "",
            "generation_id_or_member_epoch": -1,
            "topics": [{"name": "t", "partitions": [partition]}],
        }
        answer = await peer.call_and_rearm(ApiKey.OFFSET_COMMIT, 8, commit)
        assert answer.topics[0].partitions[0].error_code == InconsistentGroupProtocol.kafka_code
        assert (
            await peer.call_and_rearm(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, {**consumer, "group_id": "c"})
        ).error_code == 0
        answer = await beat(peer, 0, ["t"], group="c")
        assert answer.error_code == InconsistentGroupProtocol.kafka_code
        await peer.call_and_rearm(ApiKey.OFFSET_COMMIT, 8, {**commit, "group_id": "o"})
        answer = await beat(peer, 0, ["t"], group="o")
        assert answer.error_code == InconsistentGroupProtocol.kafka_code, "its offsets would be of no use"

    run(check, tmp_path)


def test_a_group_has_so_many_members_at_most(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        peer = await room.peer()
        for number in range(200):
            assert (await beat(peer, 0, ["t"], member=f"m{number}")).error_code == 0
        assert (await beat(peer, 0, ["t"], member="late")).error_code == GroupMaxSizeReached.kafka_code

    run(check, tmp_path)


async def described_offsets(peer: Peer, topics: list[dict[str, Any]] | None = None) -> Any:
    fields = {"groups": [{"group_id": "g", "topics": topics}]}
    (group,) = (await peer.call_and_rearm(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, 1, fields)).groups
    return group


async def altered(peer: Peer, topic: str, offset: int, index: int = 0) -> Any:
    partition = {"partition_index": index, "start_offset": offset}
    fields = {"group_id": "g", "topics": [{"topic_name": topic, "partitions": [partition]}]}
    return await peer.call_and_rearm(ApiKey.ALTER_SHARE_GROUP_OFFSETS, 0, fields)


def test_where_a_group_is_can_be_seen_altered_and_forgotten(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        await begin_early(room)
        await room.write(10, 10)
        peer = await room.peer()
        assert (await described_offsets(peer)).error_code == GroupIdNotFound.kafka_code
        await joined(peer, "t")
        (topic,) = (await described_offsets(peer)).topics
        assert [(each.start_offset, each.lag) for each in topic.partitions] == [(-1, -1)], "never read"
        await peer.fetch(0)
        part_of(await peer.fetch(20, wait_ms=5000))
        await peer.acknowledge(AckBatch(0, 3, bytes([ACCEPT])), AckBatch(8, 9, bytes([ACCEPT])))
        (topic,) = (await described_offsets(peer)).topics
        assert [(each.start_offset, each.lag) for each in topic.partitions] == [(4, 14)]
        some = [{"topic_name": "t", "partitions": [0, 5]}, {"topic_name": "x", "partitions": [0]}]
        known, unknown = (await described_offsets(peer, some)).topics
        assert [each.error_code for each in known.partitions] == [0, UnknownTopicOrPartition.kafka_code]
        assert [each.error_code for each in unknown.partitions] == [UnknownTopicOrPartition.kafka_code]
        assert (await altered(peer, "t", 15)).error_code == NonEmptyGroup.kafka_code
        await beat(peer, -1)
        (response,) = (await altered(peer, "t", -7)).responses
        assert response.partitions[0].error_code == InvalidRequest.kafka_code
        (response,) = (await altered(peer, "t", 15)).responses
        assert response.partitions[0].error_code == 0
        late = await peer.acknowledge(AckBatch(4, 5, bytes([ACCEPT])))
        assert late.topics[0][1][0].error_code == InvalidRecordState.kafka_code, "it did not settle them"
        assert part_of(await peer.fetch(20, wait_ms=5000)).acquired == [(15, 19, 1)]
        fields = {"group_id": "g", "topics": [{"topic_name": "t"}, {"topic_name": "x"}]}
        gone, unknown = (await peer.call_and_rearm(ApiKey.DELETE_SHARE_GROUP_OFFSETS, 0, fields)).responses
        assert (gone.error_code, unknown.error_code) == (0, UnknownTopicOrPartition.kafka_code)
        assert (await described_offsets(peer)).topics == []
        assert part_of(await peer.fetch(20, wait_ms=5000)).acquired == [(0, 19, 1)], "as if it were new"

    run(check, tmp_path)


def test_the_state_goes_with_the_group_and_with_the_topic(tmp_path: Path) -> None:
    async def check(room: ShareBench) -> None:
        await begin_early(room)
        await room.write(5)
        persister = room.service.share_partition_manager.persister
        for number, way in enumerate(("group", "topic")):
            peer = await room.peer(f"m{number}")
            await joined(peer, "t")
            await peer.fetch(0)
            part_of(await peer.fetch(5, wait_ms=5000))
            key = ShareKey("g", room.topic_id, 0)
            assert await persister.summary(key) is not None
            await beat(peer, -1)
            if way == "group":
                deleted = await peer.call_and_rearm(ApiKey.DELETE_GROUPS, 2, {"groups_names": ["g"]})
                assert [each.error_code for each in deleted.results] == [0]
                assert (await described_offsets(peer)).error_code == GroupIdNotFound.kafka_code
            else:
                await room.service.topics.delete(room.service.topics.find("t"))

            async def is_gone(key: ShareKey = key) -> bool:
                return await persister.summary(key) is None

            await eventually(is_gone)
            assert not room.service.share_partition_manager.share_partitions()

    run(check, tmp_path)


def test_a_group_created_by_its_offsets_outlives_a_restart_and_is_deleted_like_any_other(
    tmp_path: Path,
) -> None:
    async def before(room: ShareBench) -> None:
        await room.write(10)
        peer = await room.peer()
        assert (await altered(peer, "t", 4)).error_code == 0

    async def after(room: ShareBench) -> None:
        peer = await room.peer()
        (topic,) = (await described_offsets(peer)).topics
        assert [(each.start_offset, each.lag) for each in topic.partitions] == [(4, 6)]
        await joined(peer, "t")
        await peer.fetch(0)
        assert part_of(await peer.fetch(20, wait_ms=5000)).acquired == [(4, 9, 1)]
        await beat(peer, -1)
        assert (await altered(peer, "t", 1)).error_code == 0
        deleted = await peer.call_and_rearm(ApiKey.DELETE_GROUPS, 2, {"groups_names": ["g"]})
        assert [each.error_code for each in deleted.results] == [0]

    async def finally_(room: ShareBench) -> None:
        assert "g" not in room.service.group_coordinator.store.entries

    run(before, tmp_path)
    run(after, tmp_path)
    run(finally_, tmp_path)


def test_members_offsets_and_where_a_state_is_outlive_a_restart(tmp_path: Path) -> None:
    async def before(room: ShareBench) -> None:
        await begin_early(room)
        await room.write(10)
        peer = await room.peer()
        epochs.append(await joined(peer, "t"))
        await peer.fetch(0)
        part_of(await peer.fetch(10, wait_ms=5000))
        await peer.acknowledge(AckBatch(0, 6, bytes([ACCEPT])))
        key = f"g:{'A' * 22}:0"
        found = await peer.call_and_rearm(
            ApiKey.FIND_COORDINATOR, 6, {"key_type": 2, "coordinator_keys": [key, "g"]}
        )
        assert [each.error_code for each in found.coordinators] == [0, InvalidRequest.kafka_code]
        assert found.coordinators[0].node_id == room.service.settings.node_id

    async def after(room: ShareBench) -> None:
        peer = await room.peer()
        answer = await beat(peer, epochs[0])
        assert answer.error_code == 0, "a member that knows nothing of it goes on"
        assert answer.member_epoch >= epochs[0]
        (topic,) = (await described_offsets(peer)).topics
        assert [(each.start_offset, each.lag) for each in topic.partitions] == [(7, 3)]

    epochs: list[int] = []
    run(before, tmp_path)
    run(after, tmp_path)
