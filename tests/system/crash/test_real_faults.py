"""A broker process on a full or failing disk: affected requests get the error, others are not affected, and no
acknowledged record is lost.

The full disk is a real file system. Failing reads, writes and syncs are injected into the class that makes the
system calls.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from support.machine import scaled
from support.process import served
from support.raw_peer import RawPeer, batch_of, fetch_frame
from support.readiness import readiness
from support.small_disk import SmallDisk
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from support.process import ServedBroker

KAFKA_STORAGE_ERROR = 56
REFUSED_COMMITS = {KAFKA_STORAGE_ERROR, 15, 16}
"""A coordinator speaks of itself: COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR."""

DISK_BYTES = 24 << 20
DEADLINE_S = 15
FAULTY_SERVE = str(Path(__file__).parents[2] / "support" / "faulty_serve.py")


def end_offset_and_values(peer: RawPeer, topic: str) -> list[bytes]:
    """Everything in partition 0, batch by batch (the bytes after the header)."""
    values: list[bytes] = []
    end = peer.end_offset(topic)
    offset = 0
    while offset < end:
        peer.send(fetch_frame(topic, offset=offset))
        answer = peer.frame()
        assert answer is not None
        found = fetch.decode_response(12, answer).topics[0][2][0]
        assert found.error_code == 0
        batches = bytes(found.records)
        for position, header in iterate_batches(batches):
            if header.base_offset >= offset:
                values.append(batches[position + 61 : position + header.size])
                offset = header.last_offset + 1
    return values


def commit(peer: RawPeer, group: str, topic: str, offset: int) -> int:
    """OffsetCommit of a group without members; the error code."""
    partition = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
    fields = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "topics": [{"name": topic, "partitions": [partition]}],
    }
    return int(peer.call(ApiKey.OFFSET_COMMIT, 7, fields).topics[0].partitions[0].error_code)


def committed(peer: RawPeer, group: str, topic: str) -> int:
    fields = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
    return int(peer.call(ApiKey.OFFSET_FETCH, 5, fields).topics[0].partitions[0].committed_offset)


def create(peer: RawPeer, name: str) -> int:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "configs": []}
    answer = peer.call(ApiKey.CREATE_TOPICS, 5, {"topics": [topic], "timeout_ms": 10_000})
    return int(answer.topics[0].error_code)


def ready(broker: ServedBroker) -> tuple[int, list[dict[str, Any]]]:
    shown = readiness(broker.http_url)
    return shown["status"], shown["reasons"]


def metrics(broker: ServedBroker) -> str:
    return httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text


@pytest.mark.row("L5", "L10")
def test_real_full_disk_refuses_with_its_error_and_recovers_with_space(tmp_path: Path) -> None:
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        served(disk.path / "data", command=disk.command) as broker,
        RawPeer(broker.kafka_port) as peer,
    ):
        for topic in ("t", "other"):
            assert create(peer, topic) == 0
        acknowledged = [peer.produce("t", batch_of(b"first")).base_offset]
        assert commit(peer, "g", "t", 1) == 0
        disk.fill()
        codes = [peer.produce("t", batch_of(b"x" * 100_000)).error_code for _ in range(3)]
        codes += [peer.produce("other", batch_of(b"x" * 100_000)).error_code]
        assert set(codes) == {KAFKA_STORAGE_ERROR}
        refused_commit = 0
        number = 1
        while not refused_commit and number < 2000:  # there may be room in the last page of a file
            number += 1
            refused_commit = commit(peer, "g", "t", number)
        assert refused_commit in REFUSED_COMMITS
        assert committed(peer, "g", "t") in (number - 1, number)
        assert create(peer, "new") == KAFKA_STORAGE_ERROR
        values = end_offset_and_values(peer, "t")
        assert len(values) == 1
        assert b"first" in values[0]
        assert "mansio_" in metrics(broker)
        assert httpx.get(f"{broker.http_url}/health/live", timeout=scaled(10)).status_code == 200
        disk.free()
        for topic in ("t", "other"):
            result = peer.produce(topic, batch_of(b"after " + topic.encode()))
            assert result.error_code == 0, f"{topic}: room is enough, no restart"
        acknowledged.append(peer.end_offset("t") - 1)
        assert commit(peer, "g", "t", 5000) == 0
        wait_until(lambda: create(peer, "new") in (0, 36), DEADLINE_S, "the topic can be made")
        assert peer.produce("new", batch_of(b"x")).error_code == 0
        wait_until(lambda: ready(broker) == (200, []), DEADLINE_S, "the broker is ready")
        assert acknowledged == [0, 1]
        broker.kill()
        broker.start()
        with RawPeer(broker.kafka_port) as again:
            values = end_offset_and_values(again, "t")
            assert [b"first" in values[0], b"after t" in values[1]] == [True, True]
            assert len(values) == 2
            assert committed(again, "g", "t") == 5000
            assert len(end_offset_and_values(again, "new")) == 1
        assert "Traceback" not in broker.text()
        assert broker.stop() == 0


@pytest.mark.full
@pytest.mark.row("L5", "L10")
def test_disk_that_fills_during_writes_loses_no_acknowledged_record(tmp_path: Path) -> None:
    """The write that fills the disk is short; it is undone, and the next starts find no torn tail."""
    with (
        SmallDisk(tmp_path / "disk", DISK_BYTES) as disk,
        served(disk.path / "data", command=disk.command, http=False) as broker,
    ):
        with RawPeer(broker.kafka_port) as peer:
            for topic in ("a", "b"):
                peer.create_topic(topic, segment_bytes="2000000")
            reported: dict[str, int] = {"a": 0, "b": 0}
            refused = 0
            while refused < 6:
                for topic, size in (("a", 70_001), ("b", 30_011)):
                    if peer.produce(topic, batch_of(bytes([reported[topic] % 251]) * size)).error_code:
                        refused += 1
                    else:
                        reported[topic] += 1
            assert reported["a"] > 50
        for _ in range(2):
            broker.kill()
            broker.start()  # on a disk that is as full as before
            with RawPeer(broker.kafka_port) as peer:
                for topic in reported:
                    values = end_offset_and_values(peer, topic)
                    assert len(values) == reported[topic]
                    assert all(value.count(bytes([n % 251])) > 30_000 for n, value in enumerate(values)), (
                        topic
                    )
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.delete_topic("a")
        with RawPeer(broker.kafka_port) as peer:
            wait_until(
                lambda: peer.produce("b", batch_of(b"x" * 30_000)).error_code == 0,
                DEADLINE_S,
                "there is room",
            )
        assert "Traceback" not in broker.text()


@pytest.mark.parametrize(
    ("fault", "message"),
    smoke_first(("sync EIO /bad.", "cannot sync"), ("write_at EIO /bad.", "cannot write")),
)
@pytest.mark.full
@pytest.mark.row("L5", "L10")
def test_log_whose_disk_fails_refuses_writes_and_others_continue(
    tmp_path: Path, fault: str, message: str
) -> None:
    faults = tmp_path / "faults"
    faults.write_text("")
    command = [sys.executable, FAULTY_SERVE, str(faults)]
    with served(tmp_path / "data", command=command) as broker, RawPeer(broker.kafka_port) as peer:
        for topic in ("bad", "good"):
            peer.create_topic(topic, partitions=2)
            assert peer.produce(topic, batch_of(b"before")).error_code == 0
        wait_until(lambda: ready(broker) == (200, []), DEADLINE_S, "the broker is ready")
        faults.write_text(fault)
        assert peer.produce("bad", batch_of(b"lost")).error_code == KAFKA_STORAGE_ERROR
        faults.write_text("")
        assert peer.produce("bad", batch_of(b"lost")).error_code == KAFKA_STORAGE_ERROR, "not tried again"
        assert peer.produce("bad", batch_of(b"next door"), partition=1).error_code == 0
        assert peer.produce("good", batch_of(b"after")).error_code == 0
        assert len(end_offset_and_values(peer, "bad")) == 1, "what was durable is read, and nothing else"
        code, reasons = ready(broker)
        assert code == 503
        assert [reason["reason"] for reason in reasons] == ["log_failed"]
        assert "bad-0" in reasons[0]["detail"]
        assert message in reasons[0]["detail"]
        assert re.search(r"^mansio_\w*failed\w*(\{[^}]*\})? 1(\.0)?$", metrics(broker), re.MULTILINE)
        broker.kill()
        broker.start()
        with RawPeer(broker.kafka_port) as again:
            values = end_offset_and_values(again, "bad")
            assert b"before" in values[0]
            assert again.produce("bad", batch_of(b"works again")).error_code == 0
            assert len(end_offset_and_values(again, "good")) == 2
        wait_until(lambda: ready(broker) == (200, []), DEADLINE_S, "the broker is ready")
        assert "Traceback" not in broker.text()


@pytest.mark.full
@pytest.mark.row("L5", "L10")
def test_group_offsets_are_refused_on_a_failed_disk_and_acknowledged_ones_kept(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("")
    command = [sys.executable, FAULTY_SERVE, str(faults)]
    with served(tmp_path / "data", command=command, http=False) as broker, RawPeer(broker.kafka_port) as peer:
        peer.create_topic("t")
        assert commit(peer, "g", "t", 7) == 0
        faults.write_text("sync EIO /__consumer_offsets.")
        assert commit(peer, "g", "t", 8) in REFUSED_COMMITS
        faults.write_text("")
        assert commit(peer, "g", "t", 9) in REFUSED_COMMITS
        assert peer.produce("t", batch_of(b"x")).error_code == 0
        broker.kill()
        broker.start()
        with RawPeer(broker.kafka_port) as again:
            assert committed(again, "g", "t") in (7, 8)
            assert commit(again, "g", "t", 10) == 0
            assert committed(again, "g", "t") == 10
        assert "Traceback" not in broker.text()
