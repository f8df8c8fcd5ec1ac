"""Damage in `__consumer_offsets`: requests of a group whose records cannot be read are refused; the group does not
become empty."""

from __future__ import annotations

import pytest

from mansio.broker.coordinator import runtime
from mansio.broker.routing.routes import java_string_hash
from mansio.errors import CoordinatorNotAvailable
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.record_batch import build_batch
from unit.broker.consumer_groups_fixtures import ConsumerBroker, Member
from unit.broker.test_coordinator_runtime import RuntimeBench
from unit.broker.test_groups import PARTITIONS, Broker

MESSAGE_TOO_LARGE, COORDINATOR_NOT_AVAILABLE = 10, 15


def test_one_flipped_bit_of_a_value_stops_the_load_of_its_partition() -> None:
    """Every length still fits, so only the checksum shows it: it would have been another offset."""
    room = RuntimeBench().begin()
    room.write(b"key", b"value", 0)
    stored = room.partitions[0].stored
    stored[0] = stored[0].replace(b"value", b"walue")
    again = room.restarted()
    with pytest.raises(CoordinatorNotAvailable, match="CRC"):
        again.topic.check_loaded(0)
    assert again.view.values[0] == {}
    assert set(again.partitions[0].damaged) == {0}


def test_a_group_that_cannot_be_loaded_is_refused_and_the_others_are_served() -> None:
    broker = Broker()
    groups = {java_string_hash(name) % PARTITIONS: name for name in ("a", "b", "c", "d", "e", "f")}
    assert len(groups) == PARTITIONS
    for group in groups.values():
        partition = {"partition_index": 0, "committed_offset": 42, "committed_metadata": ""}
        answer = broker.call(
            ApiKey.OFFSET_COMMIT,
            7,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            topics=[{"name": "t", "partitions": [partition]}],
        )
        assert answer.topics[0].partitions[0].error_code == 0
    bad = 1
    stored = broker.partitions[bad].stored
    stored[0] = stored[0][:-1] + bytes([stored[0][-1] ^ 1])
    again = broker.restarted()
    for index, group in groups.items():
        wanted = [{"name": "t", "partition_indexes": [0]}]
        found = again.call(ApiKey.OFFSET_FETCH, 5, group_id=group, topics=wanted)
        described = again.call(ApiKey.DESCRIBE_GROUPS, 5, groups=[group]).groups[0]
        if index == bad:
            assert found.error_code == COORDINATOR_NOT_AVAILABLE
            assert described.error_code == COORDINATOR_NOT_AVAILABLE
        else:
            assert found.topics[0].partitions[0].committed_offset == 42
            assert described.error_code == 0


def test_a_record_of_the_new_protocol_that_cannot_be_read_stops_the_load_of_its_partition_alone() -> None:
    broker = ConsumerBroker()
    Member(broker, "a").beat()
    elsewhere = next(
        name
        for name in "abcdef"
        if broker.groups.store.partition_for(name) != broker.groups.store.partition_for("g")
    )
    Member(broker, "a", group_id=elsewhere).beat()
    key = next(iter(broker.groups.store.entries["g"].group_records))
    broker.home.append(build_batch([(0, key, b"\x00\x00\x7f", ())]), internal=True)
    broker.home.sync()
    again = broker.restarted()
    assert again.describe_consumer().error_code == COORDINATOR_NOT_AVAILABLE
    assert Member(again, "a").beat() == COORDINATOR_NOT_AVAILABLE
    assert again.describe_consumer(elsewhere).error_code == 0


def test_what_no_load_would_read_is_not_written_and_the_group_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One batch that is too large would keep every group of its partition from being loaded ever again."""
    monkeypatch.setattr(runtime, "BATCH_OUTPUT_BYTES_MAX", 20_000)
    broker = ConsumerBroker()
    small = Member(broker, "a")
    assert small.beat() == 0
    large = Member(broker, "b", [f"{number:0200}" for number in range(200)])
    assert large.beat() == MESSAGE_TOO_LARGE
    assert small.beat() == 0
    small.broker = broker.restarted()
    assert small.beat() == 0
    assert [each.member_id for each in small.broker.describe_consumer().members] == ["a"]
