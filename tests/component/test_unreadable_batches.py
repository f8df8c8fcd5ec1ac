"""Readers of a log with batches that cannot be read: all other records are delivered, once and without delay, and the
unreadable offsets are reported with their reason."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from mansio.api.grpc import mansio_pb2 as pb
from mansio.client import TopicPartition
from mansio.errors import UnreadableRecords
from mansio.testing import TestBroker
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from support.batch_contents import compressed_batch, encoded_record, raw_batch, store
from support.forked_serve import run_command
from support.machine import scaled

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    import mansio.blocking

GOOD = {0: b"a", 3: b"b", 4: b"c", 6: b"d"}
WRONG = [(1, 2), (5, 5), (7, 8)]
"""Offsets of the batches that cannot be read."""


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


def good(value: bytes) -> bytes:
    return build_batch([(1_700_000_000_000, b"k", value, ())])


def write_log(broker: TestBroker, topic: str) -> mansio.blocking.Client:
    """A topic with a garbage batch, one that is too large, and one with an unknown codec among good records."""
    client = broker.client()
    client.admin.create_topic(topic, partitions=1)
    too_large = compressed_batch(encoded_record(0, bytes(128 << 20)), 1, Codec.ZSTD)
    records = encoded_record(0, b"c") + encoded_record(1, b"x")[:-1]
    log = [
        good(b"a"),
        raw_batch(b"no gzip stream", 2, codec=Codec.GZIP),
        good(b"b"),
        compressed_batch(records, 2, Codec.LZ4),
        good(b"d"),
        raw_batch(encoded_record(0, b"x"), 2, codec=6),
    ]
    assert store(broker, topic, log) == [0, 1, 3, 4, 6, 7]
    store(broker, topic, [too_large, good(b"e")])
    return client


def test_a_consumer_raises_once_for_each_unreadable_batch_and_goes_on_behind_it(broker: TestBroker) -> None:
    client = write_log(broker, "raised")
    found: list[Any] = []
    raised: list[Any] = []
    with client.consume("raised", to_end=True) as consumer:
        while not consumer.is_finished:
            try:
                found += [message.offset for message in consumer.poll()]
            except UnreadableRecords as error:
                position = consumer.positions()[TopicPartition("raised", 0)]
                found.append((error.first_offset, error.last_offset))
                raised.append((error.topic, error.partition, position - error.last_offset))
    assert raised == [("raised", 0, 1)] * 4
    assert found == [0, (1, 2), 3, 4, (5, 5), 6, (7, 8), (9, 9), 10]


def test_iteration_continues_after_the_error(broker: TestBroker) -> None:
    client = write_log(broker, "iterated")
    with client.consume("iterated", to_end=True) as consumer:
        values: list[Any] = []
        for _ in range(5):
            try:
                values.extend(message.value for message in consumer)
            except UnreadableRecords:
                continue
    assert values == [b"a", b"b", b"c", b"d", b"e"]


def test_unreadable_offsets_are_committed_when_the_application_asks_for_more(broker: TestBroker) -> None:
    client = write_log(broker, "committed")
    with suppress(UnreadableRecords), client.consume("committed", group="g") as consumer:
        assert [message.offset for message in consumer.poll()] == [0]
        consumer.poll()
    with client.consume("committed", group="g") as consumer:
        with pytest.raises(UnreadableRecords, match="offsets 1 to 2"):
            consumer.poll()
        assert [message.offset for message in consumer.poll()] == [3]
    with client.consume("committed", group="g") as consumer:
        assert [message.offset for message in consumer.poll()] == [4]


def test_a_consumer_may_skip_or_collect_what_cannot_be_read(
    broker: TestBroker, caplog: pytest.LogCaptureFixture
) -> None:
    client = write_log(broker, "skipped")
    with caplog.at_level(logging.WARNING):
        found = [message.value for message in client.consume("skipped", to_end=True, on_unreadable="skip")]
    assert found == [b"a", b"b", b"c", b"d", b"e"]
    assert [
        record.message.partition(" read")[0]
        for record in caplog.records
        if "cannot be read" in record.message
    ] == [f"skipped-0: offsets {first} to {last} cannot be" for first, last in [*WRONG, (9, 9)]]
    collected: list[UnreadableRecords] = []
    reader = client.consume("skipped", to_end=True, on_unreadable=collected.append)
    assert [message.value for message in reader] == found
    assert [(each.first_offset, each.last_offset) for each in collected] == [*WRONG, (9, 9)]
    with pytest.raises(ValueError, match="on_unreadable"):
        client.consume("skipped", on_unreadable="ignore")  # type: ignore[arg-type]  # the mistake itself


def test_processing_commits_what_is_before_an_unreadable_batch(broker: TestBroker) -> None:
    client = write_log(broker, "processed")
    seen: list[int] = []

    def handle(messages: list[Any]) -> None:
        seen.extend(message.offset for message in messages)

    def process(**options: Any) -> None:
        with client.consume("processed", group="p", auto_commit=False, to_end=True, **options) as consumer:
            client.process(consumer, handle, transactional_id="p", wait_ms_max=scaled(1) * 1000)

    for _ in range(2):
        with pytest.raises(UnreadableRecords, match="offsets 1 to 2"):
            process()
        assert seen == [0]
    process(on_unreadable="skip")
    assert seen == [0, 3, 4, 6, 10]


def test_a_member_of_a_share_group_rejects_exactly_what_it_cannot_read(broker: TestBroker) -> None:
    client = write_log(broker, "shared")
    client.admin.alter_group_config(
        "s", {"share.auto.offset.reset": "earliest", "errors.deadletterqueue.topic.name": "dlq.shared"}
    )
    client.admin.create_topic(
        "dlq.shared", partitions=1, config={"errors.deadletterqueue.group.enable": "true"}
    )
    found: list[tuple[int, int]] = []
    with client.receive("shared", group="s") as receiver:
        while len(found) < 5:
            for message in receiver.poll():
                found.append((message.offset, message.delivery_count))
                message.ack()
    assert found == [(0, 1), (3, 1), (4, 1), (6, 1), (10, 1)]
    dead_letters = client.consume("dlq.shared", max_records=6)
    assert [int(letter.header("__dlq.errors.offset") or b"-1") for letter in dead_letters] == [
        1,
        2,
        5,
        7,
        8,
        9,
    ]


def test_http_returns_all_readable_records_and_lists_the_others(broker: TestBroker) -> None:
    write_log(broker, "over-http")
    large = raw_batch(encoded_record(0, bytes(65 << 20)), 1)
    store(broker, "over-http", [large, good(b"f")])
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(30)) as http:
        path = "/topics/over-http/partitions/0/records"
        found = http.get(path, params={"offset": 0}).json()
        assert [record["value"] for record in found["records"]] == ["a", "b", "c", "d", "e", "f"]
        assert found["next_offset"] == 13
        unreadable = [(each["first_offset"], each["last_offset"]) for each in found["unreadable"]]
        assert unreadable == [*WRONG, (9, 9), (11, 11)]
        assert "gzip" in found["unreadable"][0]["reason"]
        waited = http.get(path, params={"offset": 1, "limit": 1, "wait_ms": 10_000}).json()
        assert (waited["records"], waited["next_offset"], len(waited["unreadable"])) == ([], 3, 1)
        limited = http.get(path, params={"offset": 1, "limit": 1}).json()
        assert (limited["records"][0]["offset"], limited["next_offset"]) == (3, 4)


def test_the_number_of_unreadable_ranges_in_one_answer_is_bounded(broker: TestBroker) -> None:
    client = broker.client()
    client.admin.create_topic("only-garbage", partitions=1)
    store(broker, "only-garbage", [raw_batch(b"garbage", 3, codec=1)] * 250 + [good(b"end")])
    offset, values = 0, []
    with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(30)) as http:
        for expected in (100, 100, 50):
            path = f"/topics/only-garbage/partitions/0/records?offset={offset}"
            found = http.get(path).json()
            assert len(found["unreadable"]) == expected
            offset = found["next_offset"]
            values += [record["value"] for record in found["records"]]
    assert values == ["end"]


def test_an_event_stream_reports_unreadable_offsets_and_resumes_behind_them(broker: TestBroker) -> None:
    write_log(broker, "streamed")
    url = f"{broker.http_url}/v1/topics/streamed/events"
    seen: list[tuple[str, Any]] = []
    with httpx.stream("GET", url, params={"from": "earliest"}, timeout=scaled(30)) as response:
        kind = ""
        for line in response.iter_lines():
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("id: "):
                position = line.removeprefix("id: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                seen.append((position, data["first_offset"] if kind else data["value"]))
                kind = ""
            if len(seen) == 9:
                break
    assert [each for _, each in seen] == ["a", 1, "b", "c", 5, "d", 7, 9, "e"]
    assert [json.loads(position)["0"] for position, _ in seen] == [1, 3, 4, 5, 6, 7, 9, 10, 11]


def test_grpc_returns_all_readable_records_and_lists_the_others(broker: TestBroker) -> None:
    write_log(broker, "over-grpc")
    with grpc.insecure_channel(broker.grpc_address) as channel:
        fetch = channel.unary_unary(
            "/mansio.v1.Mansio/Fetch", pb.FetchRequest.SerializeToString, pb.FetchResponse.FromString
        )
        found = fetch(pb.FetchRequest(topic="over-grpc", offset=0), timeout=scaled(30))
    assert [record.value for record in found.records] == [b"a", b"b", b"c", b"d", b"e"]
    assert [(each.first, each.last) for each in found.unreadable] == [*WRONG, (9, 9)]
    assert found.next_offset == 11


def test_commands_print_all_readable_records_and_report_the_others(broker: TestBroker) -> None:
    client = write_log(broker, "printed")
    done = command(broker, "consume", "printed", "--from-beginning", "--exit-at-end")
    assert (done.returncode, done.stdout) == (1, b"a\nb\nc\nd\ne\n")
    lines = done.stderr.decode().splitlines()
    assert [line.split(" cannot be read")[0] for line in lines] == [
        f"mansio: printed-0: offsets {first} to {last}" for first, last in [*WRONG, (9, 9)]
    ]
    client.admin.create_topic(
        "dlq.printed", partitions=1, config={"errors.deadletterqueue.group.enable": "true"}
    )
    store(broker, "dlq.printed", [raw_batch(b"garbage", 3, codec=1)])
    done = command(broker, "dlq", "peek", "printed")
    assert done.returncode == 0
    assert b"offsets 0 to 2 cannot be read" in done.stderr


def command(broker: TestBroker, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return run_command([*arguments, "--bootstrap-servers", broker.bootstrap_servers], os.environ)
