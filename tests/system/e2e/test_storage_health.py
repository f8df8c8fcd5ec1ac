"""Errors and health of a broker whose disk is full, fails, or contains damage."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

import mansio
from mansio.wire.api_versions import ApiKey
from mansio.wire.apis import fetch
from mansio.wire.batch.record_batch import iterate_batches
from support.machine import scaled
from support.present import present
from support.process import served
from support.raw_peer import RawPeer, batch_of, fetch_frame
from support.readiness import readiness
from support.small_disk import SmallDisk
from support.waiting import wait_until

if TYPE_CHECKING:
    from support.process import ServedBroker

STORAGE_ERROR = 56
CORRUPT_MESSAGE = 2
POLICY_VIOLATION = 44
INVALID_TOPIC = 17
MAGIC_POSITION = 16
DEADLINE_S = 15
FAULTY_SERVE = str(Path(__file__).parents[2] / "support" / "faulty_serve.py")


def health(broker: ServedBroker) -> dict[str, Any]:
    return readiness(broker.http_url)


def warned(broker: ServedBroker, reason: str) -> list[dict[str, Any]]:
    return [warning for warning in health(broker)["warnings"] if warning["reason"] == reason]


def counter(broker: ServedBroker, name: str) -> float:
    text = httpx.get(f"{broker.http_url}/metrics", timeout=scaled(10)).text
    (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def lines(broker: ServedBroker, event: str) -> list[str]:
    return [line for line in broker.text().splitlines() if re.search(rf" [A-Z]+ {event}( \w+=|$)", line)]


def segment_of(broker: ServedBroker, topic: str) -> Path:
    (path,) = broker.data.glob(f"topics/{topic}.*/0/*.log")
    return path


def fetch_error(peer: RawPeer, topic: str, offset: int) -> int:
    peer.send(fetch_frame(topic, offset=offset))
    answer = peer.frame()
    assert answer is not None
    return int(fetch.decode_response(12, answer).topics[0][2][0].error_code)


@pytest.mark.full
@pytest.mark.row("L5", "T5")
def test_damage_that_readers_meet_is_one_line_a_number_and_a_reason_in_health(tmp_path: Path) -> None:
    with served(tmp_path / "data") as broker, RawPeer(broker.kafka_port) as peer:
        peer.create_topic("t")
        for number in range(3):
            assert peer.produce("t", batch_of(b"value %d" % number)).error_code == 0
        before = health(broker)
        assert (before["degraded"], counter(broker, "mansio_corrupt_batches_total")) == (False, 0)
        path = segment_of(broker, "t")
        second = next(at for at, header in iterate_batches(path.read_bytes()) if header.base_offset == 1)
        with path.open("r+b") as file:
            file.seek(second + MAGIC_POSITION)
            file.write(b"\x7f")
        for _ in range(5):
            assert fetch_error(peer, "t", 2) == CORRUPT_MESSAGE
        (line,) = lines(broker, "corrupt_batch")
        assert " ERROR corrupt_batch topic=t partition=0 offset=2 " in line
        assert path.name in line, "the file is named"
        assert counter(broker, "mansio_corrupt_batches_total") == 5
        (warning,) = warned(broker, "corrupt_batch")
        assert (warning["topic"], warning["partition"]) == ("t", 0)
        assert "5 times" in warning["detail"]
        after = health(broker)
        assert (after["status"], after["ready"], after["degraded"]) == (200, True, True)
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.delete_topic("t")
        assert warned(broker, "corrupt_batch") == [], "it went with the topic"


@pytest.mark.full
@pytest.mark.row("L10", "T5")
def test_a_refused_write_states_whether_the_disk_is_full_or_the_log_failed_or_is_damaged(
    tmp_path: Path,
) -> None:
    faults = tmp_path / "faults"
    faults.write_text("")
    command = [sys.executable, FAULTY_SERVE, str(faults)]
    with served(tmp_path / "data", command=command) as broker:
        with RawPeer(broker.kafka_port) as peer, mansio.blocking.connect(broker.bootstrap_servers) as client:
            for topic in ("full", "bad", "rotten"):
                peer.create_topic(topic)
                assert peer.produce(topic, batch_of(b"before")).error_code == 0

            faults.write_text("write_at ENOSPC /full.\n")
            refused = peer.produce("full", batch_of(b"x"))
            assert refused.error_code == STORAGE_ERROR
            assert refused.error_message is not None
            assert refused.error_message.startswith("full-0: the broker's disk is full")
            with pytest.raises(mansio.MansioError, match="disk is full"):
                client.publish("full", b"x")
            (warning,) = warned(broker, "disk_full")
            assert "full-0" in warning["detail"]
            assert health(broker)["status"] == 200, "what is there is read"
            faults.write_text("")
            assert peer.produce("full", batch_of(b"after")).error_code == 0
            assert warned(broker, "disk_full") == [], "at once"
            assert [len(lines(broker, event)) for event in ("disk_full", "disk_space_available")] == [1, 1]

            faults.write_text("sync EIO /bad.\n")
            for _ in range(2):  # the write whose sync failed, and one after it
                refused = peer.produce("bad", batch_of(b"x"))
                assert refused.error_code == STORAGE_ERROR
                assert refused.error_message is not None
                assert refused.error_message.startswith("bad-0: its log failed and accepts no writes")
                assert "Input/output error" in refused.error_message
                assert str(tmp_path) not in refused.error_message
            with pytest.raises(mansio.MansioError, match="its log failed"):
                client.publish("bad", b"x")
            faults.write_text("")
        assert broker.stop() == 0
        segment_of(broker, "rotten").write_bytes(b"")
        broker.start()
        with RawPeer(broker.kafka_port) as peer, mansio.blocking.connect(broker.bootstrap_servers) as client:
            refused = peer.produce("rotten", batch_of(b"x"))
            assert refused.error_code == STORAGE_ERROR
            assert refused.error_message is not None
            assert refused.error_message.startswith("rotten-0 is not open: ")
            with pytest.raises(mansio.MansioError, match="rotten-0 is not open"):
                client.publish("rotten", b"x")


@pytest.mark.row("L5", "L10")
def test_full_disk_shows_at_once_and_a_new_group_reads_when_there_is_room(tmp_path: Path) -> None:
    """`__consumer_offsets` is made by the first group of all; here that one meets a full disk."""
    with (
        SmallDisk(tmp_path / "disk", 24 << 20) as disk,
        served(disk.path / "data", command=disk.command) as broker,
        RawPeer(broker.kafka_port) as peer,
    ):
        peer.create_topic("t")
        assert peer.produce("t", batch_of(b"value")).error_code == 0
        wait_until(
            lambda: health(broker)["disk"].get("free_bytes", 0) > 1 << 20, DEADLINE_S, "space is known"
        )
        disk.fill()
        assert peer.produce("t", batch_of(b"x" * 100_000)).error_code == STORAGE_ERROR
        wait_until(lambda: health(broker)["disk"]["free_bytes"] < 1 << 20, 8, "it is not up to 10 s old")
        assert warned(broker, "disk_full")
        found: list[bytes] = []

        def read() -> None:
            with mansio.blocking.connect(broker.bootstrap_servers) as client:
                found.extend(
                    present(message.value)
                    for message in client.consume("t", group="g", max_records=1, from_="earliest")
                )

        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            alone = client.consume("t", from_="earliest", max_records=1)
            assert [message.value for message in alone] == [b"value"], "without a group"
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(1.5)
        assert reader.is_alive(), "it goes on trying"
        disk.free()
        reader.join(scaled(DEADLINE_S))
        assert found == [b"value"]
        assert peer.produce("t", batch_of(b"x" * 100_000)).error_code == 0
        wait_until(lambda: not warned(broker, "disk_full"), 8, "room shows too")


@pytest.mark.full
@pytest.mark.row("T5")
def test_what_the_start_cut_is_in_health_and_numbers(tmp_path: Path) -> None:
    with served(tmp_path / "data") as broker:
        with RawPeer(broker.kafka_port) as peer:
            peer.create_topic("t")
            assert peer.produce("t", batch_of(b"value")).error_code == 0
        assert broker.stop() == 0
        with segment_of(broker, "t").open("ab") as file:
            file.write(batch_of(b"torn" * 100)[:300])
        broker.start()
        (warning,) = warned(broker, "log_truncated")
        assert (warning["topic"], warning["partition"]) == ("t", 0)
        assert "300 bytes" in warning["detail"]
        assert counter(broker, "mansio_log_truncations_total") == 1
        assert counter(broker, "mansio_log_truncated_bytes_total") == 300
        assert broker.stop() == 0
        broker.start()
        assert not health(broker)["degraded"], "said until the next start"


@pytest.mark.row("O2", "T5")
def test_what_administrators_change_is_a_line_each_and_so_are_the_stop_and_its_end(tmp_path: Path) -> None:
    with served(tmp_path / "data", http=False) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic("t", partitions=2)
            client.admin.create_partitions("t", 3)
            client.admin.alter_topic_config("t", {"retention.ms": "5000"})
            client.admin.quotas.set(client_id="app", values={"producer_byte_rate": 1_000_000})
            client.publish("t", b"a secret")
            client.admin.delete_topic("t")
        assert broker.stop() == 0
        text = broker.text()
        for line in (
            r" INFO topic_created topic=t id=\S+ partitions=2",
            r" INFO partitions_added topic=t partitions_before=2 partitions=3",
            r' INFO topic_settings_changed topic=t changed="?retention.ms=5000"?',
            r' INFO quota_changed entity="client_id=app" values="producer_byte_rate=1000000"',
            r" INFO topic_deleted topic=t id=\S+",
            r" INFO broker_stopping drain_ms=5000",
            r" INFO broker_stopped node=1",
        ):
            assert len(re.findall(line + "$", text, re.MULTILINE)) == 1, line
        assert "a secret" not in text


@pytest.mark.row("A6")
def test_topic_of_group_offsets_keeps_what_groups_depend_on(tmp_path: Path) -> None:
    with mansio.Broker(tmp_path, offsets_topic_num_partitions=1) as broker:
        with mansio.blocking.connect(broker.address) as client:
            client.admin.create_topic("t")
            client.admin.reset_offsets("g", ["t"], to="latest")
        with RawPeer(int(broker.address.rpartition(":")[2])) as peer:

            def alter(name: str, value: str | None, operation: int = 0) -> tuple[int, str]:
                config = {"name": name, "config_operation": operation, "value": value}
                resource = {"resource_type": 2, "resource_name": "__consumer_offsets", "configs": [config]}
                answer = peer.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource]})
                return answer.responses[0].error_code, answer.responses[0].error_message or ""

            for name, value in (
                ("cleanup.policy", "delete"),
                ("retention.ms", "1"),
                ("max.message.bytes", "100"),
                ("message.timestamp.type", "LogAppendTime"),
            ):
                code, message = alter(name, value)
                assert code == POLICY_VIOLATION, name
                assert name in message
            assert alter("segment.bytes", str(1 << 20)) == (0, "")
            assert alter("segment.bytes", None, operation=1) == (0, "")
            resource = {"resource_type": 2, "resource_name": "__consumer_offsets", "configs": []}
            answer = peer.call(ApiKey.ALTER_CONFIGS, 1, {"resources": [resource]})
            assert answer.responses[0].error_code == 0
            topic = present(broker._broker).service.topics.find("__consumer_offsets")
            assert (topic.configs["cleanup.policy"], topic.configs["retention.ms"]) == ("compact", "-1")

            names = {"topic_names": ["__consumer_offsets"], "timeout_ms": 1000}
            assert peer.call(ApiKey.DELETE_TOPICS, 5, names).responses[0].error_code == INVALID_TOPIC
            more = {"topics": [{"name": "__consumer_offsets", "count": 2, "assignments": None}]}
            grown = peer.call(ApiKey.CREATE_PARTITIONS, 2, {**more, "timeout_ms": 1000})
            assert grown.results[0].error_code == INVALID_TOPIC
            gone = {"name": "__consumer_offsets", "partitions": [{"partition_index": 0, "offset": -1}]}
            deleted = peer.call(ApiKey.DELETE_RECORDS, 1, {"topics": [gone], "timeout_ms": 1000})
            assert deleted.topics[0].partitions[0].error_code == INVALID_TOPIC
